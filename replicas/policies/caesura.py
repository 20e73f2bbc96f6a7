"""Caesura's own policy: triage by the SLO, holds by optimal stopping, steps that keep the pace."""

from bisect import bisect_right
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from replicas.policies.stopping import Stopping
from replicas.policies.triage import HOPELESS, Triage, haste
from replicas.policy import LoadView, Policy


class CaesuraParameters(BaseModel):
    """Parameters of the policy `caesura`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    hopeless_share: float = Field(0.01, ge=0, le=1)
    """Part of the replica's time, in expectation, that goes to turns that cannot be good any more, before all others.
    They get more wherever the others leave any."""
    ageing: float = Field(0.05, ge=0)
    """Without an SLO: seconds of work that a second of waiting makes up for."""
    refresh_steps: int = Field(8, ge=1)
    """Ranks are taken again every so many steps: waiting makes turns hopeless."""
    review_steps: int = Field(8, ge=1)
    """Holds are looked at again every so many steps."""
    newcomers_room: float = Field(0.1, ge=0, lt=1)
    """Part of the memory that a program's first turn leaves to the programs that have begun."""
    hopeless_room: float = Field(0.5, ge=0, lt=1)
    """Part of the memory that a turn that cannot be good any more leaves to all others, on an overloaded replica;
    without a host tier four fifths of it."""
    hold_worth: float = Field(1.0, gt=0)
    """What losing a context costs, in times of computing it again: more, and holds last longer."""
    min_observations: int = Field(3, ge=1)
    """A tool's own durations count from so many observations on; before, all tools' together."""
    reserve_share: float = Field(0.0, ge=0, lt=1)
    """Part of the memory that admissions leave to the growth of running turns."""
    min_prefill_tokens: int = Field(64, ge=1)
    """However slow the steps, so many tokens of prompts may be computed in each."""
    step_saturations: float = Field(2.0, ge=1)
    """The largest step where many wait that can still be in time, in times of the tokens for which reading the weights
    takes as long as computing. Where none do it is once as many: a prompt is spread over steps that read the weights
    anyway, and the turns that decode beside it hardly notice."""

    prompt_share: float = Field(0.25, gt=0, le=1)
    """Part of the bound on the time to the first token within which the prompts under way are to be computed; steps are
    larger where that takes it."""

    def build(self) -> Policy:
        """The policy."""
        order = Triage(self.hopeless_share, self.ageing, self.refresh_steps, self.newcomers_room, self.hopeless_room)
        return Policy(
            "caesura",
            order,
            Stopping(self.hold_worth, self.min_observations, self.review_steps),
            PacedBudget(self.min_prefill_tokens, self.step_saturations, self.prompt_share),
            self.reserve_share,
            order,
            (HOPELESS,),
        )


@dataclass(frozen=True, slots=True)
class PacedBudget:
    """The largest step that spreads prompts well and whose time is within the bound on the time per output token."""

    min_prefill_tokens: int
    step_saturations: float
    prompt_share: float

    def _hurried(self, load: LoadView) -> int:
        """Tokens of a step with which the prompts under way are computed in time: b with P / b steps of b tokens."""
        ttft_s, tokens = load.facts.slo.ttft_s, load.prefill_tokens
        if ttft_s is None or not tokens:
            return 0
        cost = load.facts.cost
        compute_s = self.prompt_share * ttft_s - tokens * cost.token_s
        if compute_s <= 0:
            return load.facts.max_tokens
        fixed_s = cost.decode_step_s(load.running, load.running_tokens)
        return load.running + round(min(tokens * fixed_s / compute_s, load.facts.max_tokens))

    def tokens(self, load: LoadView) -> int:
        """Every running turn's next token, and as much prefill as the bounds let in; all where nothing runs."""
        most, bound_s = load.facts.max_tokens, load.facts.slo.tpot_s
        if not load.running:
            return most
        saturations = 1.0 + (self.step_saturations - 1.0) * haste(load)
        spread = round(saturations * load.facts.cost.saturation_tokens)
        most = min(most, max(spread, self._hurried(load), load.running + self.min_prefill_tokens))
        if bound_s is None:
            return most
        cost, context, sequences = load.facts.cost, load.running_tokens, load.running + 1

        def step_s(tokens: int) -> float:
            # One more prompt beside the decodes: its own pairs only, theirs are in reading their KV.
            return cost.step_s(tokens, context + tokens, sequences, pairs=context + tokens * tokens / 2)

        within = bisect_right(range(1, most + 1), bound_s, key=step_s)
        return min(most, max(within, load.running + self.min_prefill_tokens))
