"""What is worth being written to disk. Pure: numbers in, decisions out.

The copy of a program's context is worth the seconds that loading it saves compared with computing it
(`cluster.core.kv_price`), if the program comes back. It is written if it saves anything, and if it would be complete
before the next turn is expected: a turn that comes earlier finds its KV on the device or on the host. On a replica that
its programs leave, the next turn finds neither, so the context is written even if the pause is short.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.core.kv_price import KvRates, Place
from replicas.host_tier import Standing


class WriteOutcome(StrEnum):
    """What became of a paused program's context. The values are labels of a metric."""

    WRITTEN = "written"
    LAST_TURN = "last_turn"
    """No later turn of the program is expected."""
    NO_GAIN = "no_gain"
    """Loading it would take as long as computing it."""
    SHORT_PAUSE = "short_pause"
    """The next turn is expected before the context would be written."""
    NO_ROOM = "no_room"
    """Only a part was written, or nothing: what the tier has is worth more."""
    NOT_ON_HOST = "not_on_host"
    """The host tier has not kept it, from which it would be written."""
    STOPPED = "stopped"
    """The tier does not write now, because the volume has failed or all slots are in use."""


@dataclass(slots=True)
class Speed:
    """The measured time of a chunk in one direction.

    Args:
        chunk_s: assumed seconds of a chunk, until one was measured.
    """

    chunk_s: float

    def measure(self, chunks: int, seconds: float) -> None:
        """Note how long a transfer took. Recent transfers weigh more, and long ones more than short ones."""
        share = chunks / (chunks + MEMORY_CHUNKS)
        self.chunk_s += share * (seconds / chunks - self.chunk_s)


MEMORY_CHUNKS = 64
"""Number of chunks by which a speed is known half."""

ASSUMED_BYTES_PER_S = 1e9
ASSUMED_CHUNK_S = 1e-4
"""Speed of a volume that was not measured yet: bytes a second, and seconds for each file."""


def assumed_speed(chunk_bytes: int) -> Speed:
    """Return the speed of a volume of which nothing is known."""
    return Speed(ASSUMED_CHUNK_S + chunk_bytes / ASSUMED_BYTES_PER_S)


def disk_standing(host: Standing, read_s: float) -> Standing:
    """Return the standing of a program's copy on disk, given its standing on the host.

    Args:
        host: the standing on the host, where ``saved_s`` is 0 if no later turn is expected.
        read_s: seconds in which a token is read.
    """
    rates = KvRates(host.computed_s, host.link_s, read_s)
    return replace(host, saved_s=rates.saved_s(Place.DISK, Place.COMPUTE) if host.returns else 0.0)


def host_standing(host: Standing, read_s: float) -> Standing:
    """Return the standing on the host of a program whose context is on disk, too. The copy there saves only the read.

    The arguments are those of `disk_standing`.
    """
    rates = KvRates(host.computed_s, host.link_s, read_s)
    saved_s = min(rates.saved_s(Place.HOST, Place.DISK), rates.saved_s(Place.HOST, Place.COMPUTE))
    return replace(host, saved_s=min(host.saved_s, saved_s))


def refusal(standing: Standing, write_s: float, *, leaving: bool = False) -> WriteOutcome | None:
    """Return why a paused program's context is not written; None: it is.

    Args:
        standing: its standing on disk.
        write_s: seconds until it would be written, after what is being written already.
        leaving: whether the next turn goes to another replica, which finds the context only on disk.
    """
    if not standing.returns:
        return WriteOutcome.LAST_TURN
    if standing.saved_s <= 0.0:
        return WriteOutcome.NO_GAIN
    if write_s > standing.pause_s and not leaving:
        return WriteOutcome.SHORT_PAUSE
    return None
