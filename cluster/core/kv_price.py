"""The price of each place where the KV of a paused program may be, until its next turn. Pure.

A price is seconds: of the GPU, and of the turn that waits. A replica compares the places by it when a program pauses,
and when it chooses what is written to disk and what the host tier evicts. The router compares replicas by it when a
turn comes. The same context has the same price for both, since both get the same measured rates.

| place | seconds of the GPU | seconds that the turn waits |
| --- | --- | --- |
| device | its share of the memory, for the pause, as far as others need the memory | 0 |
| host | 0 | over the host link |
| disk | 0 | from the volume to the host, then over the link; the same on each replica that sees the volume |
| compute | to compute it | the same seconds |

Transfers over the link and from the volume do not keep the GPU from computing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Place(StrEnum):
    """Where the KV of a program may be. Labels of metrics."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    COMPUTE = "compute"
    """Nowhere: it is computed again."""


@dataclass(frozen=True, slots=True)
class Price:
    """What it costs that a context is in a place, in seconds."""

    gpu_s: float
    wait_s: float

    @property
    def seconds(self) -> float:
        """Both together. While the GPU computes a context, its turn waits: these are the same seconds, counted once."""
        return max(self.gpu_s, self.wait_s)


@dataclass(frozen=True, slots=True)
class KvRates:
    """Seconds for the KV of one token. Infinite: there is no such way."""

    compute_s: float
    link_s: float = inf
    """Between the host and the device, one way."""
    read_s: float = inf
    """From the volume to the host."""

    def price(self, place: Place, tokens: float) -> Price:
        """Return the price of a context in any place but the device.

        Args:
            place: the place.
            tokens: tokens of the context.

        Raises:
            ValueError: the place is the device, whose price depends on time: see `memory_s`.
        """
        match place:
            case Place.HOST:
                return Price(0.0, _times(tokens, self.link_s))
            case Place.DISK:
                return Price(0.0, _times(tokens, self.read_s + self.link_s))
            case Place.COMPUTE:
                return Price(_times(tokens, self.compute_s), _times(tokens, self.compute_s))
            case Place.DEVICE:
                raise ValueError("the price of a hold depends on its time")

    def cheapest(self, places: Iterable[Place], tokens: float) -> tuple[Place, Price]:
        """Return the place of least price, and its price. Computing is always possible.

        Of equal prices the first place counts, in the order of `places`; computing comes last.
        """
        priced = [(place, self.price(place, tokens)) for place in (*places, Place.COMPUTE)]
        return min(priced, key=lambda one: one[1].seconds)

    def saved_s(self, place: Place, other: Place) -> float:
        """Return the seconds that one token costs less in ``place`` than in ``other``, at least 0."""
        return max(0.0, self.price(other, 1.0).seconds - self.price(place, 1.0).seconds)


def memory_s(tokens: float, seconds: float, capacity_tokens: float, scarcity: float) -> Price:
    """Return the price of a context that stays on the device.

    Args:
        tokens: tokens of the context.
        seconds: how long it stays.
        capacity_tokens: tokens whose KV fits into the device's memory.
        scarcity: how much others need the memory, in [0, 1]. At 1, all memory together is worth all work of the GPU.
    """
    return Price(seconds * tokens / capacity_tokens * scarcity, 0.0)


def held_for_s(price: Price, tokens: float, capacity_tokens: float, scarcity: float) -> float:
    """Return the seconds after which a hold has cost as much as ``price``. The arguments are those of `memory_s`."""
    return price.seconds * capacity_tokens / (tokens * scarcity)


def _times(tokens: float, seconds: float) -> float:
    """Return the product; 0 for no tokens, however long one takes."""
    return tokens * seconds if tokens > 0 else 0.0
