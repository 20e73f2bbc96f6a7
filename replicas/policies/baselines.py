"""The policies that hold nothing: vLLM's own scheduling, and PLAS.

vLLM: turns in order of arrival, the full token budget. PLAS: programs by the service that they have received, least
first; source: Autellix (Luo et al. 2025), program-level attained service.
"""

from dataclasses import dataclass
from math import log2

from pydantic import BaseModel, ConfigDict, Field

from cluster.core.lifecycle.events import PauseReason
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
        return Release(PauseReason.POLICY)

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


class PlasParameters(BaseModel):
    """Parameters of the policy `plas`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    quantum_tokens: int = Field(1024, ge=1)
    """Service, in tokens computed, that a program may receive in the first level; each level lasts twice as long."""
    levels: int = Field(8, ge=1)
    """Number of levels; a program that has received more service stays in the last."""

    def build(self) -> Policy:
        """The policy."""
        return Policy("plas", AttainedService(self.quantum_tokens, self.levels), NoHold(), FullBudget())


@dataclass(frozen=True, slots=True)
class AttainedService:
    """Least attained service of the program's earlier turns, in discrete levels; arrival of the turn within a level.

    Levels keep programs of about equal service from overtaking each other at every turn.
    """

    quantum_tokens: int
    levels: int

    @property
    def refresh_steps(self) -> None:
        """Service only changes when a turn ends."""
        return None

    def key(self, turn: TurnView) -> RankKey:
        """(level, arrival of the turn in seconds)."""
        level = int(log2(1 + turn.program.served_tokens / self.quantum_tokens))
        return (float(min(level, self.levels - 1)), turn.arrived_s)
