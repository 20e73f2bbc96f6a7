"""The KV blocks of paused programs: which program holds which blocks, and until when. Each block is freed once."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

from cluster.core.errors import IntegrityError
from cluster.core.slo import Slo
from replicas.policy import NOTHING_EXPECTED, Forecast

Block = TypeVar("Block")
Key = TypeVar("Key", bound=Hashable)

SPARE_EXPIRIES = 64
"""Number of stale entries that the expiry heap may have beside one per hold. Beyond it, the heap is rebuilt."""

LOOKS_A_STEP = 8
"""Largest number of holds that one step reviews."""


class RoundRobin(Generic[Key]):
    """Keys that are visited periodically, spread over the steps, so that no step pays for all of them.

    The key whose last visit is oldest comes first.

    Args:
        most: largest number of visits of a step. With many keys the period grows, so that a step's cost does not.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 0
        self._looked: OrderedDict[Key, int] = OrderedDict()
        self._hastened: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._looked)

    def add(self, key: Key) -> None:
        """Add a key as visited now, for the first time or again."""
        self._looked[key] = self._step
        self._looked.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Remove a key, if it is here."""
        self._looked.pop(key, None)
        self._hastened.pop(key, None)

    def hasten(self, keys: Iterable[Key]) -> None:
        """Let those keys that are here be visited in the next step, or as soon as its bound allows."""
        self._hastened.update((key, None) for key in keys if key in self._looked)

    def next(self, steps: int | None) -> list[Key]:
        """Return the keys to visit in this step. It is called once in each step.

        These are an equal share of all keys, those that would otherwise wait for more than ``steps`` steps, and those
        that are hastened, ``most`` at most. Of these, half are left to keys that are hastened. Without ``steps``, only
        these are visited.
        """
        self._step += 1
        keys: list[Key] = []
        if steps is not None:
            share, due = -(-len(self._looked) // steps), self._step - steps
            most = self._most - min(len(self._hastened), self._most // 2)
            for key, looked in self._looked.items():
                if len(keys) >= most or (len(keys) >= share and looked > due):
                    break
                keys.append(key)
        for key in keys:
            self._hastened.pop(key, None)
        keys += islice(self._hastened, self._most - len(keys))
        for key in keys:
            self._hastened.pop(key, None)
            self._looked[key] = self._step
            self._looked.move_to_end(key)
        return keys


class HoldOrigin(Enum):
    """Why blocks are held."""

    POLICY = "policy"
    ASKED = "asked"
    """The client asked for the hold."""
    FETCHED = "fetched"
    """The blocks were loaded from the host tier for a turn that will come soon."""


@dataclass(frozen=True, slots=True)
class HeldBlocks(Generic[Block]):
    """One program's hold. ``blocks`` are in the order of their tokens."""

    key: str
    blocks: Sequence[Block]
    tokens: int
    since_s: float
    until_s: float
    origin: HoldOrigin = HoldOrigin.POLICY
    forecast: Forecast = NOTHING_EXPECTED
    """The forecast of the turn that the pause followed."""
    bounds: Slo | None = None
    """The bounds of the program's next turn, once it waits for admission."""


class HoldTable(Generic[Block]):
    """The holds, at most one for each program.

    The table owns one reference to each block. ``free`` gives a program's references back.

    Args:
        free: called with a hold's blocks, the last first, so that the end of a context is evicted before its beginning.
    """

    def __init__(self, free: Callable[[Sequence[Block]], None]) -> None:
        self._free = free
        self._holds: dict[str, HeldBlocks[Block]] = {}
        self._ends: dict[str, float] = {}
        """End of each hold that `expired` has not reported, in seconds, by program key."""
        self._expiry: list[tuple[float, str]] = []
        """A heap with every entry of ``_ends``, and with stale entries."""
        self._reviews: RoundRobin[str] = RoundRobin(LOOKS_A_STEP)
        self._holders: Counter[int] = Counter()
        """Number of holds of each held block, by its identity."""
        self._num_tokens = 0
        self._changed: dict[str, None] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[HeldBlocks[Block]]:
        return iter(self._holds.values())

    def get(self, key: str) -> HeldBlocks[Block] | None:
        """Return the program's hold, or None if it has none."""
        return self._holds.get(key)

    def take_changed(self) -> list[str]:
        """Return the programs whose hold has begun or changed since the last call, the first change first."""
        keys = list(self._changed)
        self._changed.clear()
        return keys

    @property
    def num_blocks(self) -> int:
        """Number of held blocks. A block that several programs hold counts once."""
        return len(self._holders)

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is held, summed over the holds: those of a shared block count for each program."""
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

        Args:
            key: the program's key.
            blocks: the blocks, in the order of their tokens.
            tokens: tokens whose KV they hold.
            since_s: time of the beginning, in seconds.
            until_s: time of the end, in seconds.
            origin: why they are held.
            forecast: the forecast of the turn that the pause followed.

        Raises:
            IntegrityError: the program already has a hold, or ``until_s`` is before ``since_s`` or not finite.
        """
        if key in self._holds:
            raise IntegrityError(f"{key} is held already")
        if not since_s <= until_s < float("inf"):
            raise IntegrityError(f"{key}: a hold from {since_s} until {until_s} would never end")
        self._changed[key] = None
        self._holds[key] = HeldBlocks(key, tuple(blocks), tokens, since_s, until_s, origin, forecast)
        self._set_end(key, until_s)
        self._reviews.add(key)
        self._holders.update(map(id, blocks))
        self._num_tokens += tokens

    def extend(self, key: str, until_s: float, origin: HoldOrigin | None = None) -> None:
        """Move the end of a hold, to a later or earlier time.

        Args:
            key: the program's key.
            until_s: the new end, in seconds.
            origin: why it is held from now on. None leaves it as it is.

        Raises:
            IntegrityError: the program has no hold, or ``until_s`` is not finite.
        """
        held = self._holds.get(key)
        if held is None or not until_s < float("inf"):
            raise IntegrityError(f"{key}: no hold to move to {until_s}")
        self._changed[key] = None
        self._holds[key] = replace(held, until_s=until_s, origin=origin or held.origin)
        self._set_end(key, until_s)

    def returned(self, key: str, bounds: Slo | None = None) -> None:
        """Stop reviewing the program's hold, if it has one: its next turn has come and waits for admission.

        Args:
            key: the program's key.
            bounds: the bounds of that turn.
        """
        self._reviews.remove(key)
        if (held := self._holds.get(key)) is not None:
            self._changed[key] = None
            self._holds[key] = replace(held, bounds=bounds)

    def release(self, key: str) -> int:
        """Give a program's blocks back. Return their number, which is 0 if it held none."""
        held = self._holds.pop(key, None)
        if held is None:
            return 0
        self._changed.pop(key, None)
        self._ends.pop(key, None)
        self._drop_stale_ends()
        self._reviews.remove(key)
        self._drop(held.blocks)
        self._num_tokens -= held.tokens
        self._free(held.blocks[::-1])
        return len(held.blocks)

    def trim(self, key: str, blocks: int, tokens: int) -> int:
        """Give the last blocks of a program's hold back.

        Args:
            key: the program's key.
            blocks: number of its first blocks that stay held.
            tokens: tokens whose KV these hold.

        Returns:
            The number of blocks that were given back.

        Raises:
            IntegrityError: the program has no hold, or it has fewer blocks or tokens.
        """
        held = self._holds.get(key)
        if held is None or not 0 <= blocks <= len(held.blocks) or not 0 <= tokens <= held.tokens:
            raise IntegrityError(f"{key}: no hold to trim to {blocks} blocks with {tokens} tokens")
        dropped = held.blocks[blocks:]
        self._changed[key] = None
        self._holds[key] = replace(held, blocks=held.blocks[:blocks], tokens=tokens)
        self._drop(dropped)
        self._num_tokens -= held.tokens - tokens
        self._free(dropped[::-1])
        return len(dropped)

    def replace(self, key: str, blocks: Sequence[Block], tokens: int) -> None:
        """Take over the references to ``blocks``, which have more of the next prompt, and give the old ones back.

        Args:
            key: the program's key.
            blocks: the blocks, in the order of their tokens.
            tokens: tokens whose KV they hold.

        Raises:
            IntegrityError: the program has no hold.
        """
        held = self._holds.get(key)
        if held is None:
            raise IntegrityError(f"{key}: no hold to replace")
        self._changed[key] = None
        self._holds[key] = replace(held, blocks=tuple(blocks), tokens=tokens)
        self._holders.update(map(id, blocks))
        self._drop(held.blocks)
        self._num_tokens += tokens - held.tokens
        self._free(held.blocks[::-1])

    def _drop(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._holders[id(block)] -= 1
            if not self._holders[id(block)]:
                del self._holders[id(block)]

    def due(self, steps: int) -> list[HeldBlocks[Block]]:
        """Return the holds to review in this step, without those whose program is back. It is called once in each step.

        Each hold comes up every ``steps`` calls. With more than ``steps`` · LOOKS_A_STEP holds the period is longer.
        """
        return [self._holds[key] for key in self._reviews.next(steps)]

    def expired(self, now_s: float) -> list[str]:
        """Return the programs whose hold ended at or before ``now_s``, the earliest first. Each is reported once."""
        keys: list[str] = []
        while self._expiry and self._expiry[0][0] <= now_s:
            until_s, key = heapq.heappop(self._expiry)
            if self._ends.get(key) == until_s:
                del self._ends[key]
                keys.append(key)
        return keys

    def _set_end(self, key: str, until_s: float) -> None:
        """Queue an end. A hold that is extended often must not leave an entry for each extension."""
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
        holders = Counter(id(block) for held in self._holds.values() for block in held.blocks)
        tokens = sum(held.tokens for held in self._holds.values())
        if holders != self._holders or tokens != self._num_tokens:
            counted, there = (len(self._holders), self._num_tokens), (len(holders), tokens)
            raise IntegrityError(f"{counted} blocks and tokens counted, {there} held")
        if len(self._expiry) > 2 * len(self._holds) + SPARE_EXPIRIES:
            raise IntegrityError(f"{len(self._expiry)} ends are queued for {len(self._holds)} holds")
