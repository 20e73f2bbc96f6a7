"""Rendezvous hashing with bounded loads: a place that all who see the same replicas agree on, without a word.

Each pair of a key and a replica has a weight; the key goes to the replica of the greatest (Thaler and Ravishankar,
1998), or, where that has more than its part, to the next (as in Mirrokni et al., "Consistent hashing with bounded
loads", 2018). A replica that comes or goes changes the place of its own keys only.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import ceil

TOP = 2**64


def weight(key: str, replica: str) -> int:
    """Of a pair, in [0, `TOP`)."""
    pair = f"{len(key)}\n{key}{replica}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(pair, digest_size=8).digest(), "little")


def ranked(key: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order in which ``key`` prefers them."""
    return sorted(replicas, key=lambda replica: (-weight(key, replica), replica))


def bounded(key: str, programs: Mapping[str, int], bound: float) -> str | None:
    """The replica of ``key``; None where there is none.

    Args:
        key: what is placed.
        programs: that each replica has.
        bound: no replica gets more than so many times the mean, rounded up; at least 1.
    """
    if not programs:
        return None
    most = ceil(bound * (sum(programs.values()) + 1) / len(programs))
    order = ranked(key, programs)
    return next((replica for replica in order if programs[replica] + 1 <= most), order[0])
