"""vLLM's own priority scheduling, with the arrival of the program as the priority of each of its turns.

An operator of stock vLLM 0.29 can set this today: ``--scheduling-policy priority``, and the field ``priority`` of each
request. The turns of programs that arrived earlier are admitted first. vLLM preempts the running turn of the latest
program where memory is short; a waiting turn preempts nobody.

Example: program a arrives at 1.0 s, and program b at 2.0 s. Their turns have the priorities 1000 and 2000. The second
turn of a, which arrives at 5.0 s, is admitted before the first turn of b if that still waits.
"""

from pydantic import BaseModel, ConfigDict

from cluster.core.program import ProgramIdentity
from replicas.cost_model import CostModel
from replicas.peers.peer import Peer, RequestFields

UNITS_PER_S = 1000
"""vLLM's priorities are integers: here the milliseconds of the program's arrival."""


class VllmPriorityParameters(BaseModel):
    """The peer `vllm-priority` has no parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def build(self, cost: CostModel) -> Peer:
        """Return the peer. It ignores the costs, because its order needs arrivals only."""
        return VllmPriority()


class VllmPriority(Peer):
    """A client that notes when each program sent its first turn."""

    scheduling_policy = "priority"

    def __init__(self) -> None:
        self._arrivals_s: dict[str, float] = {}

    def fields(self, identity: ProgramIdentity, now_s: float) -> RequestFields:
        """Return the arrival of the program in milliseconds as the priority.

        A turn without a program is a program of its own.
        """
        arrived_s = now_s if identity.key is None else self._arrivals_s.setdefault(identity.key, now_s)
        if identity.last_turn and identity.key is not None:
            del self._arrivals_s[identity.key]
        return RequestFields(priority=round(arrived_s * UNITS_PER_S))
