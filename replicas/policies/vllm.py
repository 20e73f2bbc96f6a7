"""vLLM's own scheduling: turns in order of arrival, nothing held, the full token budget. The baseline."""

from pydantic import BaseModel, ConfigDict

from replicas.policy import (
    Claimant,
    Hold,
    HoldView,
    LoadView,
    PauseDecision,
    PauseView,
    Policy,
    RankKey,
    Release,
    TurnView,
    Why,
)


class ArrivalOrder:
    """First come, first served, as vLLM counts it: by the turn, not by the program."""

    refresh_steps = None

    def key(self, turn: TurnView) -> RankKey:
        """Equal for all: the queue's own order stands."""
        return ()


class NoHold:
    """Blocks go back at the end of every turn; the prefix cache may still have them at the next."""

    review_steps = None

    def decide(self, pause: PauseView) -> PauseDecision:
        """Release."""
        return Release(Why.POLICY)

    def review(self, hold: HoldView) -> PauseDecision:
        """A hold that somebody asked for lasts as long as they asked."""
        return Hold(hold.until_s)

    def victim_key(self, hold: HoldView) -> RankKey:
        """Holds that somebody asked for through the side channel: longest held first."""
        return (hold.since_s,)

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """To anyone."""
        return True


class FullBudget:
    """vLLM's max_num_batched_tokens at every step."""

    def tokens(self, load: LoadView) -> int:
        """All of it."""
        return load.facts.max_tokens


class VllmParameters(BaseModel):
    """The policy `vllm` has no parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def build(self) -> Policy:
        """The policy."""
        return Policy("vllm", ArrivalOrder(), NoHold(), FullBudget())
