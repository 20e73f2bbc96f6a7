"""Which programs' KV is on which volume of the disk tier, by the snapshots of the replicas that wrote it. Pure.

A volume outlives its replicas. So what a replica has written counts after it is gone, until the programs that it names
are forgotten, too. A file may have been deleted meanwhile; the next turn then computes what it does not find.
"""

from collections import OrderedDict
from collections.abc import Container

from router.candidate import NO_NAMES

MAX_WRITERS = 256
"""Replicas of a volume whose contents are remembered; of more, those that have published longest ago are forgotten."""


class Volume:
    """The programs on one volume."""

    def __init__(self) -> None:
        self._written: OrderedDict[str, tuple[frozenset[int], float]] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        return any(name in names for names, _ in self._written.values())

    def wrote(self, replica: str, names: frozenset[int], now_s: float, kept_s: float) -> None:
        """Replace what a replica has on the volume, and forget replicas that have been silent for ``kept_s``."""
        self._written[replica] = (names, now_s)
        self._written.move_to_end(replica)
        while len(self._written) > MAX_WRITERS or now_s - next(iter(self._written.values()))[1] > kept_s:
            self._written.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget a replica that reads another volume now."""
        self._written.pop(replica, None)

    @property
    def is_empty(self) -> bool:
        """Whether no replica has written there."""
        return not self._written


class Volumes:
    """The volumes of all replicas.

    Args:
        kept_s: seconds for which the programs of a replica count that is gone.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._volumes: dict[str, Volume] = {}

    def wrote(self, replica: str, volume: str, names: frozenset[int], now_s: float) -> Container[int]:
        """Take what a replica's snapshot says of its disk tier. Return the programs on the volume that it reads.

        Args:
            replica: its id.
            volume: the volume's name; empty: it reads none now.
            names: the programs whose KV it has written there.
            now_s: the time, in seconds.
        """
        for name in [name for name in self._volumes if name != volume]:
            if volume:
                self._volumes[name].forget(replica)
            if self._volumes[name].is_empty:
                del self._volumes[name]
        if not volume:
            return NO_NAMES
        found = self._volumes.setdefault(volume, Volume())
        found.wrote(replica, names, now_s, self._kept_s)
        return found
