"""What replicas say of themselves, handed from Ray's router threads to whoever places programs in this process.

Ray builds its routers itself, in a thread and an event loop of their own, from arguments that can be sent between
processes: they cannot be given an object of ours. So they meet their readers here, by the deployment's name.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from types import MappingProxyType

from cluster.routing import ReplicaSnapshot

logger = logging.getLogger("ray.serve")

View = Mapping[str, ReplicaSnapshot | None]
"""The replicas that can be reached, by unique id, each with its newest snapshot; None: it has told nothing of use."""

Subscriber = Callable[[View], None]


class Board:
    """Thread-safe: written from routers' threads, read by subscribers in their own event loops."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._views: dict[str, View] = {}
        self._packed: dict[str, tuple[object, ReplicaSnapshot | None]] = {}
        self._subscribers: dict[str, list[tuple[asyncio.AbstractEventLoop, Subscriber]]] = {}
        self._junk = 0

    @property
    def junk(self) -> int:
        """What replicas published that was no snapshot."""
        return self._junk

    def publish(self, deployment: str, replicas: Iterable[tuple[str, object]]) -> None:
        """The replicas of a deployment, now.

        Args:
            deployment: its name.
            replicas: their unique ids, and what each has published: a snapshot's bytes, or anything else.
        """
        told = dict(replicas)
        with self._lock:
            view = {replica: self._read(f"{deployment}/{replica}", packed) for replica, packed in told.items()}
            for gone in self._views.get(deployment, {}).keys() - view.keys():
                self._packed.pop(f"{deployment}/{gone}", None)
            self._views[deployment] = seen = MappingProxyType(view)
            subscribers = list(self._subscribers.get(deployment, ()))
        for loop, subscriber in subscribers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(subscriber, seen)

    def view(self, deployment: str) -> View:
        """What was published last."""
        with self._lock:
            return self._views.get(deployment, MappingProxyType({}))

    def subscribe(self, deployment: str, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` in the running event loop: with what is known now, and with all that comes.

        Returns:
            Ends it.
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
        """Each snapshot comes with every update of any replica; it is decoded once."""
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
            self._junk += 1
        self._packed[name] = (packed, snapshot)
        return snapshot


BOARD = Board()
"""The one of this process."""
