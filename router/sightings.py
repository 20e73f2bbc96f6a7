"""What an ingress has heard of its replicas, and when."""

from collections.abc import Mapping
from enum import StrEnum

from cluster.clock import Clock
from cluster.routing import ReplicaSnapshot


class ReplicaState(StrEnum):
    """What an ingress knows of a replica that it could send turns to. Label of a metric."""

    UP = "up"
    DRAINING = "draining"
    SILENT = "silent"
    """It has told nothing of use."""


class Sightings:
    """The newest snapshot of each replica that can be reached."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[ReplicaSnapshot | None, float]] = {}

    def __contains__(self, replica: object) -> bool:
        return replica in self._seen

    def __getitem__(self, replica: str) -> ReplicaSnapshot | None:
        return self._seen[replica][0]

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None]) -> None:
        """The replicas that can be reached now; None: nothing of use is told of one."""
        now_s = self._clock.now_s()
        before, self._seen = self._seen, {}
        for replica, snapshot in snapshots.items():
            last, at_s = before.get(replica, (None, now_s))
            news = snapshot is None or last is None or snapshot.number != last.number
            self._seen[replica] = (snapshot, now_s if news else at_s)

    def ages_s(self) -> dict[str, float | None]:
        """For each replica, the age of its newest snapshot; None: it has told nothing of use."""
        now_s = self._clock.now_s()
        return {replica: None if said is None else now_s - at_s for replica, (said, at_s) in self._seen.items()}

    def states(self) -> dict[ReplicaState, int]:
        """Replicas in each state; every state is there."""
        counts = dict.fromkeys(ReplicaState, 0)
        for snapshot, _ in self._seen.values():
            if snapshot is None:
                counts[ReplicaState.SILENT] += 1
            else:
                counts[ReplicaState.DRAINING if snapshot.draining else ReplicaState.UP] += 1
        return counts
