"""Which replica a simulated program lives on. One function, to be replaced by the cluster's router."""

from collections.abc import Sequence


def place(programs: Sequence[int]) -> int:
    """The replica with the fewest live programs, the first one of several; ``programs`` are the counts."""
    return min(range(len(programs)), key=programs.__getitem__)
