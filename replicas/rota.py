"""A periodic look at many things, spread over the steps, so that no step pays for all of them."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Rota(Generic[Key]):
    """Keys, and whose turn it is. Whoever was not looked at for longest comes first.

    Args:
        most: looks that a step may take; beyond it the period grows, so that a step's cost does not.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._step = 0
        self._looked: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._looked)

    def add(self, key: Key) -> None:
        """A key that is looked at now, for the first time or again."""
        self._looked[key] = self._step
        self._looked.move_to_end(key)

    def remove(self, key: Key) -> None:
        """A key that needs no look any more; nothing happens if it is not here."""
        self._looked.pop(key, None)

    def next(self, steps: int) -> list[Key]:
        """Whose turn it is in this step; called once in each.

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
