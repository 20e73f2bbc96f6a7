"""The policies that hold nothing: vLLM's own scheduling, and PLAS.

vLLM orders turns by arrival and uses the full token budget. PLAS orders programs by the service that they have
received, the least first. Source: Autellix (Luo et al. 2025), program-level attained service.
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
    """First come, first served, as in vLLM: by the arrival of the turn, not of the program."""

    refresh_steps = None

    def key(self, turn: TurnView) -> RankKey:
        """Return an equal rank for all turns, so that the queue's own order stays."""
        return ()


class NoHold:
    """Frees the blocks at the end of every turn. The prefix cache may still have them at the next turn."""

    review_steps = None

    def decide(self, pause: PauseView) -> PauseDecision:
        """Release the KV."""
        return Release(PauseReason.POLICY)

    def review(self, hold: HoldView) -> PauseDecision:
        """Keep a requested hold for as long as it was requested."""
        return Hold(hold.until_s)

    def victim_key(self, hold: HoldView) -> RankKey:
        """Return the rank for eviction of holds that were requested through the side channel.

        The oldest is evicted first.
        """
        return (hold.since_s,)

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """Return True: every hold may be evicted for any claimant."""
        return True


class FullBudget:
    """vLLM's max_num_batched_tokens at every step."""

    def tokens(self, load: LoadView) -> int:
        """Return vLLM's limit."""
        return load.facts.max_tokens


class VllmParameters(BaseModel):
    """The policy `vllm` has no parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def build(self) -> Policy:
        """Return arrival order, no holds, and full steps: what vLLM does by itself."""
        return Policy("vllm", ArrivalOrder(), NoHold(), FullBudget(), meets_requests=False)


class PlasParameters(BaseModel):
    """Parameters of the policy `plas`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    quantum_tokens: int = Field(1024, ge=1)
    """Service, in computed tokens, that a program may receive in the first level. Each further level allows twice as
    much."""
    levels: int = Field(8, ge=1)
    """Number of levels. A program that has received more service stays in the last one."""

    def build(self) -> Policy:
        """Return the order of least attained service (PLAS), no holds, and full steps."""
        return Policy(
            "plas", AttainedService(self.quantum_tokens, self.levels), NoHold(), FullBudget(), meets_requests=False
        )


@dataclass(frozen=True, slots=True)
class AttainedService:
    """Orders by least attained service of the program's earlier turns, in discrete levels, then by arrival of the turn.

    Levels keep programs of about equal service from overtaking each other at every turn.
    """

    quantum_tokens: int
    levels: int

    @property
    def refresh_steps(self) -> None:
        """None: service changes only when a turn ends."""
        return None

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (level, arrival of the turn in seconds)."""
        level = int(log2(1 + turn.program.served_tokens / self.quantum_tokens))
        return (float(min(level, self.levels - 1)), turn.arrived_s)
