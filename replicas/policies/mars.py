"""LAMPS and MARS: turns ordered by the memory that they will occupy over time, and pauses by predicted least waste.

Sources: LAMPS sections 4.2 (handling), 4.3 (ranking, refresh) and 4.4 (starvation); MARS section 3, steps 1 and 2. Both
rank by the integral of KV memory over time under the predicted handling, the least first. LAMPS ranks each segment of a
program as a new request. MARS ranks the remaining work, so that a context that is still in memory does not count.
"""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from replicas.policies.waste import Handling, LeastWaste, Predicted, iteration_s, lost_share, predicted
from replicas.policy import LoadView, Policy, RankKey, TurnView


class LampsParameters(BaseModel):
    """Parameters of the policy `lamps`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    starvation_steps: int = Field(100, ge=1)
    """Number of steps that a turn of a scheduled program waits until the program moves to the head of the queue."""
    refresh_steps: int = Field(10, ge=1)
    """Number of steps between two rankings of all waiting turns."""
    step_tokens: int | None = Field(384, ge=1)
    """Tokens of a step at most, prompts and decodes together. The default is that of the authors' script. null: vLLM's
    own limit."""
    ranks_running: bool = True
    """Whether running turns have ranks, too, as each iteration's batch is built from the ranked list. false: their
    prompts are computed, and they are preempted, in the order of admission."""
    evicts_ends: bool = True
    """Whether a turn that lacks memory gets only the end of a preserved context. false: the whole context is
    discarded."""
    cache_aware: bool = True
    """Whether only what the prefix cache will have lost by the resume counts as recomputation. false: all of the
    context counts, as in the papers."""

    def build(self) -> Policy:
        """Return the order by memory over time until the next call has been handled (LAMPS)."""
        return self._policy("lamps", remaining=False)

    def _policy(self, name: str, remaining: bool) -> Policy:
        order = MemoryOverTime(self.starvation_steps, self.refresh_steps, self.cache_aware, remaining)
        return Policy(
            name,
            order,
            LeastWaste(Predicted(self.cache_aware)),
            StepLimit(self.step_tokens),
            ranks_running=self.ranks_running,
            evicts_ends=self.evicts_ends,
        )


@dataclass(frozen=True, slots=True)
class StepLimit:
    """A constant limit of the tokens of a step, which no number of running turns exceeds."""

    step_tokens: int | None
    """None: vLLM's own limit."""

    def tokens(self, load: LoadView) -> int:
        """Return the limit, or the number of running turns if it is larger, at most vLLM's own limit."""
        return min(load.facts.max_tokens, max(self.step_tokens or load.facts.max_tokens, load.running))


class MarsParameters(LampsParameters):
    """Parameters of the policy `mars`."""

    def build(self) -> Policy:
        """Return the order of `lamps` by the remaining work alone (MARS)."""
        return self._policy("mars", remaining=True)


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """Ranks starving programs first, then all by their memory over time until the next call has been handled.

    LAMPS section 4.4: a request that waits for ``starvation_steps`` iterations is starving and comes first until it
    completes. The counter is active only once the request was scheduled, so that a new request cannot starve, and it
    begins again with each call and each preemption. A request is a whole program here, as there. MARS does not repeat
    the sentence about the activation, and is otherwise the same.

    A segment ends with its call (LAMPS section 4.2, MARS section 3, multi-API), so the growth after the call belongs to
    the score of the next turn. Its forecast is exact then, as the returned tokens are known.
    """

    starvation_steps: int
    refresh_steps: int
    cache_aware: bool
    remaining: bool
    """Whether only memory that the turn still has to fill counts (MARS)."""

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (0 if starving, token-seconds)."""
        waited_steps = max(turn.load.step - turn.queued_step, turn.longest_wait_steps)
        starving = turn.begun and waited_steps >= self.starvation_steps
        return (0.0 if starving else 1.0, self.token_seconds(turn))

    def token_seconds(self, turn: TurnView) -> float:
        """Return the integral in token-seconds: growth until the call, and what the call's handling adds."""
        load, prompt = turn.load, turn.tokens
        output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
        grown = growth(load, min(turn.cached_tokens, prompt) if self.remaining else 0, prompt, output)
        if turn.forecast.pause_s <= 0:
            return grown
        return grown + self._handling(load, prompt + round(output), turn.forecast.pause_s)

    def _handling(self, load: LoadView, context: int, pause_s: float) -> float:
        """Return the token-seconds of the call's handling.

        A preserved context is constant for the pause. A discarded one is zero, then a ramp while it is computed again.
        A swapped one has two ramps of transfer.
        """
        wastes = predicted(load, context, load.running_tokens, pause_s, self.cache_aware)
        match wastes.least:
            case Handling.PRESERVE:
                return wastes.preserve
            case Handling.DISCARD:
                lost = lost_share(load) if self.cache_aware else 1.0
                return lost * load.facts.cost.prefill_s(context) * context / 2
            case Handling.SWAP:
                return load.facts.cost.swap_s(context) * context


def growth(load: LoadView, start: int, prompt: int, output: float) -> float:
    """Return the token-seconds of memory that grows from ``start`` to ``prompt`` in one pass, then by a token per
    iteration.
    """
    prefill_s = load.facts.cost.prefill_s(prompt - start, start)
    return prefill_s * (start + prompt) / 2 + iteration_s(load) * (prompt * output + output * output / 2)
