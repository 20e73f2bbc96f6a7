"""The KV blocks of paused programs: who holds how many, until when, and that every one of them is given back once."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from cluster.errors import IntegrityError
from replicas.rota import Rota

Block = TypeVar("Block")

LOOKS_A_STEP = 8
"""Holds that one step looks at again, at most."""


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


class HoldTable(Generic[Block]):
    """At most one hold a program. Owns one reference to each block; ``free`` gives a program's references back.

    Args:
        free: called with a hold's blocks, last first, so that the tail is evicted before the prefix it extends.
    """

    def __init__(self, free: Callable[[Sequence[Block]], None]) -> None:
        self._free = free
        self._holds: dict[str, HeldBlocks[Block]] = {}
        self._expiry: list[tuple[float, str]] = []
        self._rota: Rota[str] = Rota(LOOKS_A_STEP)
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
    ) -> None:
        """Take over the references to ``blocks``.

        Raises:
            IntegrityError: the program holds already, or would be held until before ``since_s``.
        """
        if key in self._holds:
            raise IntegrityError(f"{key} is held already")
        if not since_s <= until_s < float("inf"):
            raise IntegrityError(f"{key}: a hold from {since_s} until {until_s} would never end")
        self._holds[key] = HeldBlocks(key, tuple(blocks), tokens, since_s, until_s, origin)
        heapq.heappush(self._expiry, (until_s, key))
        self._rota.add(key)
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
        heapq.heappush(self._expiry, (until_s, key))

    def returned(self, key: str) -> None:
        """The program is back and waits to be admitted: its hold, if it has one, is not looked at any more."""
        self._rota.remove(key)

    def release(self, key: str) -> int:
        """Give a program's blocks back; the number of blocks (0: it held none)."""
        held = self._holds.pop(key, None)
        if held is None:
            return 0
        self._rota.remove(key)
        self._num_blocks -= len(held.blocks)
        self._num_tokens -= held.tokens
        self._free(held.blocks[::-1])
        return len(held.blocks)

    def due(self, steps: int) -> list[HeldBlocks[Block]]:
        """Holds to look at in this step; called once a step. Not those whose program is back.

        Each comes up every ``steps`` calls, or with more than ``steps`` · LOOKS_A_STEP as soon as it is its turn.
        """
        return [self._holds[key] for key in self._rota.next(steps)]

    def expired(self, now_s: float) -> list[str]:
        """Programs whose hold ended at or before ``now_s``, earliest first. Each is told once."""
        keys: list[str] = []
        while self._expiry and self._expiry[0][0] <= now_s:
            until_s, key = heapq.heappop(self._expiry)
            held = self._holds.get(key)
            # An entry of a hold that was released or moved since is stale.
            if held is not None and held.until_s == until_s and key not in keys:
                keys.append(key)
        return keys

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the counts are those of the holds."""
        blocks = sum(len(held.blocks) for held in self._holds.values())
        tokens = sum(held.tokens for held in self._holds.values())
        if (blocks, tokens) != (self._num_blocks, self._num_tokens):
            raise IntegrityError(f"{(self._num_blocks, self._num_tokens)} counted, {(blocks, tokens)} held")
