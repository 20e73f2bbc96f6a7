"""What is kept for a reader who asks now and then, until it says how much it has: a lost answer loses nothing."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Fresh(Generic[Item]):
    """What a reader does not have yet."""

    number: int
    """How many there were in all: what the reader says next time."""
    lost: int
    """Items that it never had and that are gone."""
    items: tuple[Item, ...]


class Outbox(Generic[Item]):
    """The latest items, numbered.

    Args:
        limit: of more, the oldest are lost.
    """

    def __init__(self, limit: int) -> None:
        self._items: deque[Item] = deque(maxlen=limit)
        self.number = 0
        """How many were put in."""

    def put(self, item: Item) -> None:
        """One more."""
        self._items.append(item)
        self.number += 1

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def since(self, taken: int) -> Fresh[Item]:
        """What came after the first ``taken``. A reader that has more than there ever were knew another outbox."""
        taken = taken if 0 <= taken <= self.number else 0
        wanted = self.number - taken
        kept = min(wanted, len(self._items))
        return Fresh(self.number, wanted - kept, tuple(islice(self._items, len(self._items) - kept, None)))
