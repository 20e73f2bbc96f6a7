"""The snapshots that replicas publish, as they reach the ingress: their hub, and the health of replicas."""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from enum import StrEnum
from threading import Lock
from types import MappingProxyType

from cluster.core.clock import Clock
from cluster.core.replica_snapshot import ReplicaSnapshot

logger = logging.getLogger("ray.serve")

RECENT_S = 5.0
"""A snapshot is recent for this long: replicas publish one every second. One that hangs publishes none."""

SnapshotView = Mapping[str, ReplicaSnapshot | None]
"""The replicas that can be reached, by unique id, each with its newest snapshot; None: it has published none."""

Subscriber = Callable[[SnapshotView], None]


class SnapshotHub:
    """Hands snapshots from the threads of Ray's routers to subscribers in their own event loops. Thread-safe.

    Ray makes its routers itself, in threads and event loops of their own, from arguments that can be sent between
    processes. So they cannot be given an object of ours, and meet their subscribers here, by the deployment's name.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._views: dict[str, SnapshotView] = {}
        self._packed: dict[str, tuple[object, ReplicaSnapshot | None]] = {}
        self._subscribers: dict[str, list[tuple[asyncio.AbstractEventLoop, Subscriber]]] = {}
        self._unreadable = 0

    @property
    def unreadable(self) -> int:
        """Publications that were no snapshot."""
        return self._unreadable

    def publish(self, deployment: str, replicas: Iterable[tuple[str, object]]) -> None:
        """The replicas of a deployment as of now.

        Args:
            deployment: its name.
            replicas: their unique ids, and what each has published: the bytes of a snapshot, or anything else.
        """
        published = dict(replicas)
        with self._lock:
            view = {replica: self._read(f"{deployment}/{replica}", packed) for replica, packed in published.items()}
            for gone in self._views.get(deployment, {}).keys() - view.keys():
                self._packed.pop(f"{deployment}/{gone}", None)
            self._views[deployment] = seen = MappingProxyType(view)
            subscribers = list(self._subscribers.get(deployment, ()))
        for loop, subscriber in subscribers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(subscriber, seen)

    def view(self, deployment: str) -> SnapshotView:
        """The last publication."""
        with self._lock:
            return self._views.get(deployment, MappingProxyType({}))

    def subscribe(self, deployment: str, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` in the running event loop: now, and with each publication.

        Returns:
            A function that ends the subscription.
        """
        entry = (asyncio.get_running_loop(), subscriber)
        with self._lock:
            self._subscribers.setdefault(deployment, []).append(entry)
        subscriber(self.view(deployment))

        def end() -> None:
            with self._lock:
                self._subscribers[deployment].remove(entry)

        return end

    def _read(self, name: str, packed: object) -> ReplicaSnapshot | None:
        """Each snapshot comes with every update of any replica, but is decoded once."""
        before = self._packed.get(name)
        if before is not None and before[0] == packed:
            return before[1]
        snapshot = None
        if isinstance(packed, bytes):
            try:
                snapshot = ReplicaSnapshot.decode(packed)
            except ValueError as error:
                logger.debug("replica %s: %s", name, error)
        if snapshot is None and packed is not None:
            self._unreadable += 1
        self._packed[name] = (packed, snapshot)
        return snapshot


HUB = SnapshotHub()
"""The hub of this process."""


class ReplicaStatus(StrEnum):
    """A replica's status as an ingress sees it. Label of a metric."""

    UP = "up"
    DRAINING = "draining"
    SILENT = "silent"
    """It has published no snapshot."""


class ReplicaHealth:
    """The newest snapshot of each replica that can be reached, and its age."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[ReplicaSnapshot | None, float]] = {}

    def __contains__(self, replica: object) -> bool:
        return replica in self._seen

    def __getitem__(self, replica: str) -> ReplicaSnapshot | None:
        return self._seen[replica][0]

    def observe(self, snapshots: SnapshotView) -> None:
        """The replicas that can be reached now, each with its newest snapshot."""
        now_s = self._clock.now_s()
        before, self._seen = self._seen, {}
        for replica, snapshot in snapshots.items():
            last, at_s = before.get(replica, (None, now_s))
            news = snapshot is None or last is None or snapshot.number != last.number
            self._seen[replica] = (snapshot, now_s if news else at_s)

    def ages_s(self) -> dict[str, float | None]:
        """For each replica, the age of its newest snapshot; None: it has published none."""
        now_s = self._clock.now_s()
        return {replica: None if snapshot is None else now_s - at_s for replica, (snapshot, at_s) in self._seen.items()}

    def starts_s(self) -> list[float]:
        """How long the start of each replica took (seconds), as far as they have reported it."""
        return [one.start_s for one, _ in self._seen.values() if one is not None and one.start_s > 0]

    def first(self, failed: Container[str] = ()) -> str | None:
        """The replica with the first id of those that are expected to answer; None: there is none.

        Replicas that drain are chosen only if there are no others, and so are those without a recent snapshot, and
        those in ``failed``. Of these reasons, the last one counts most.
        """

        def rank(replica: str) -> tuple[bool, bool, bool, str]:
            snapshot, at_s = self._seen[replica]
            recent = snapshot is not None and self._clock.now_s() - at_s <= RECENT_S
            return replica in failed, not recent, snapshot is not None and snapshot.draining, replica

        return min(self._seen, key=rank, default=None)

    def states(self) -> dict[ReplicaStatus, int]:
        """The number of replicas in each state, including states without replicas."""
        counts = dict.fromkeys(ReplicaStatus, 0)
        for snapshot, _ in self._seen.values():
            if snapshot is None:
                counts[ReplicaStatus.SILENT] += 1
            else:
                counts[ReplicaStatus.DRAINING if snapshot.draining else ReplicaStatus.UP] += 1
        return counts
