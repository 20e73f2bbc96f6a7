"""What is worth being written to disk. Pure: numbers in, decisions out.

The copy of a program's context is worth the seconds that loading it saves compared with computing it, if the program
comes back. It is written if it saves anything, and if it would be complete before the next turn is expected: a turn
that comes earlier finds its KV on the device or on the host.
"""

from dataclasses import dataclass
from enum import StrEnum

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


def disk_standing(host: Standing, chunk_tokens: int, read_chunk_s: float) -> Standing:
    """Return the standing of a program's copy on disk, given its standing on the host.

    Args:
        host: the standing on the host, where ``saved_s`` is 0 if no later turn is expected.
        chunk_tokens: tokens of a chunk.
        read_chunk_s: seconds in which a chunk is read.
    """
    saved_s = max(0.0, host.computed_s - read_chunk_s / chunk_tokens) if host.returns else 0.0
    return Standing(host.resident, saved_s, host.pause_s, host.since_s, host.computed_s, host.returns)


def refusal(standing: Standing, write_s: float) -> WriteOutcome | None:
    """Return why a paused program's context is not written; None: it is.

    Args:
        standing: its standing on disk.
        write_s: seconds until it would be written, after what is being written already.
    """
    if not standing.returns:
        return WriteOutcome.LAST_TURN
    if standing.saved_s <= 0.0:
        return WriteOutcome.NO_GAIN
    if write_s > standing.pause_s:
        return WriteOutcome.SHORT_PAUSE
    return None
