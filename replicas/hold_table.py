"""The KV blocks of paused programs: which program holds which, until when. Each block is given back once."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from cluster.core.errors import IntegrityError
from replicas.policy import NOTHING_EXPECTED, Forecast

Block = TypeVar("Block")
Key = TypeVar("Key", bound=Hashable)

SPARE_EXPIRIES = 64
"""Stale entries that the queue of ends may have beside as many as there are holds; then it is built anew."""

LOOKS_A_STEP = 8
"""Holds that one step looks at again, at most."""


class RoundRobin(Generic[Key]):
    """Keys that are looked at periodically, spread over the steps, so that no step pays for all of them.

    The key that was not looked at for longest comes first.

    Args:
        most: looks that a step may take. With more keys the period grows, so that a step's cost does not.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 0
        self._looked: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._looked)

    def add(self, key: Key) -> None:
        """Add a key that is looked at now, for the first time or again."""
        self._looked[key] = self._step
        self._looked.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Drop a key, if it is here."""
        self._looked.pop(key, None)

    def next(self, steps: int) -> list[Key]:
        """The keys to look at in this step; called once in each.

        An equal share of all, and whoever would else wait for more than ``steps`` steps; ``most`` at most.
        """
        self._step += 1
        share, due = -(-len(self._looked) // steps), self._step - steps
        keys: list[Key] = []
        for key, looked in self._looked.items():
            if len(keys) >= self._most or (len(keys) >= share and looked > due):
                break
            keys.append(key)
        for key in keys:
            self._looked[key] = self._step
            self._looked.move_to_end(key)
        return keys


class HoldOrigin(Enum):
    """Why blocks are held."""

    POLICY = "policy"
    ASKED = "asked"
    """The client asked for it."""
    FETCHED = "fetched"
    """They were loaded from the host tier for a turn that is on its way."""


@dataclass(frozen=True, slots=True)
class HeldBlocks(Generic[Block]):
    """One program's hold. ``blocks`` in the order of their tokens."""

    key: str
    blocks: Sequence[Block]
    tokens: int
    since_s: float
    until_s: float
    origin: HoldOrigin = HoldOrigin.POLICY
    forecast: Forecast = NOTHING_EXPECTED
    """Of the turn that the pause followed."""


class HoldTable(Generic[Block]):
    """At most one hold a program. Owns one reference to each block; ``free`` gives a program's references back.

    Args:
        free: called with a hold's blocks, last first, so that the tail is evicted before the prefix it extends.
    """

    def __init__(self, free: Callable[[Sequence[Block]], None]) -> None:
        self._free = free
        self._holds: dict[str, HeldBlocks[Block]] = {}
        self._ends: dict[str, float] = {}
        """Of each hold whose end has not been reported by `expired`."""
        self._expiry: list[tuple[float, str]] = []
        """A heap with every entry of ``_ends``, and stale ones."""
        self._reviews: RoundRobin[str] = RoundRobin(LOOKS_A_STEP)
        self._num_blocks = 0
        self._num_tokens = 0

    def __contains__(self, key: object) -> bool:
        return key in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[HeldBlocks[Block]]:
        return iter(self._holds.values())

    def get(self, key: str) -> HeldBlocks[Block] | None:
        """The program's hold, if it has one."""
        return self._holds.get(key)

    @property
    def num_blocks(self) -> int:
        """Blocks held; one that two programs share counts twice."""
        return self._num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is held."""
        return self._num_tokens

    def hold(
        self,
        key: str,
        blocks: Sequence[Block],
        tokens: int,
        since_s: float,
        until_s: float,
        origin: HoldOrigin = HoldOrigin.POLICY,
        forecast: Forecast = NOTHING_EXPECTED,
    ) -> None:
        """Take over the references to ``blocks``.

        Raises:
            IntegrityError: the program holds already, or would be held until before ``since_s``.
        """
        if key in self._holds:
            raise IntegrityError(f"{key} is held already")
        if not since_s <= until_s < float("inf"):
            raise IntegrityError(f"{key}: a hold from {since_s} until {until_s} would never end")
        self._holds[key] = HeldBlocks(key, tuple(blocks), tokens, since_s, until_s, origin, forecast)
        self._set_end(key, until_s)
        self._reviews.add(key)
        self._num_blocks += len(blocks)
        self._num_tokens += tokens

    def extend(self, key: str, until_s: float, origin: HoldOrigin | None = None) -> None:
        """Move the end of a hold, to later or earlier; ``origin``: who wants it so, None is who did before.

        Raises:
            IntegrityError: the program is not held, or ``until_s`` is not finite.
        """
        held = self._holds.get(key)
        if held is None or not until_s < float("inf"):
            raise IntegrityError(f"{key}: no hold to move to {until_s}")
        self._holds[key] = replace(held, until_s=until_s, origin=origin or held.origin)
        self._set_end(key, until_s)

    def returned(self, key: str) -> None:
        """The program is back and waits to be admitted: its hold, if it has one, is not looked at any more."""
        self._reviews.remove(key)

    def release(self, key: str) -> int:
        """Give a program's blocks back; the number of blocks (0: it held none)."""
        held = self._holds.pop(key, None)
        if held is None:
            return 0
        self._ends.pop(key, None)
        self._drop_stale_ends()
        self._reviews.remove(key)
        self._num_blocks -= len(held.blocks)
        self._num_tokens -= held.tokens
        self._free(held.blocks[::-1])
        return len(held.blocks)

    def due(self, steps: int) -> list[HeldBlocks[Block]]:
        """Holds to look at in this step; called once a step. Not those whose program is back.

        Each comes up every ``steps`` calls, or with more than ``steps`` · LOOKS_A_STEP as soon as it is its turn.
        """
        return [self._holds[key] for key in self._reviews.next(steps)]

    def expired(self, now_s: float) -> list[str]:
        """Programs whose hold ended at or before ``now_s``, earliest first. Each is reported once."""
        keys: list[str] = []
        while self._expiry and self._expiry[0][0] <= now_s:
            until_s, key = heapq.heappop(self._expiry)
            if self._ends.get(key) == until_s:
                del self._ends[key]
                keys.append(key)
        return keys

    def _set_end(self, key: str, until_s: float) -> None:
        """Queue an end. A hold that is extended often must not leave an entry for each time."""
        if self._ends.get(key) == until_s:
            return
        self._ends[key] = until_s
        heapq.heappush(self._expiry, (until_s, key))
        self._drop_stale_ends()

    def _drop_stale_ends(self) -> None:
        if len(self._expiry) > 2 * len(self._ends) + SPARE_EXPIRIES:
            self._expiry = [(end_s, name) for name, end_s in self._ends.items()]
            heapq.heapify(self._expiry)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the counts are those of the holds."""
        blocks = sum(len(held.blocks) for held in self._holds.values())
        tokens = sum(held.tokens for held in self._holds.values())
        if (blocks, tokens) != (self._num_blocks, self._num_tokens):
            raise IntegrityError(f"{(self._num_blocks, self._num_tokens)} counted, {(blocks, tokens)} held")
        if len(self._expiry) > 2 * len(self._holds) + SPARE_EXPIRIES:
            raise IntegrityError(f"{len(self._expiry)} ends are queued for {len(self._holds)} holds")
