"""PLAS: programs by the service that they have received, least first. Nothing is held.

Source: Autellix (Luo et al. 2025), program-level attained service.
"""

from dataclasses import dataclass
from math import log2

from pydantic import BaseModel, ConfigDict, Field

from replicas.policies.vllm import FullBudget, NoHold
from replicas.policy import Policy, RankKey, TurnView


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
