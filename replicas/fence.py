"""Which turns are late: sent to this replica by somebody who has not heard that their program lives elsewhere now."""

from collections import OrderedDict

MAX_FENCED = 65_536
"""Programs whose epochs are remembered, those heard of last."""


class Fence:
    """The highest epoch that this replica was told of each program (`router.decisions.Home.epoch`).

    What is forgotten is let through: a turn on an old home costs a recomputation, no wrong answer.
    """

    def __init__(self, max_programs: int = MAX_FENCED) -> None:
        self._max_programs = max_programs
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._epochs)

    def tell(self, key: str, epoch: int) -> None:
        """The program has been placed, here or elsewhere, with this epoch."""
        self._epochs[key] = max(epoch, self._epochs.get(key, epoch))
        self._epochs.move_to_end(key)
        if len(self._epochs) > self._max_programs:
            self._epochs.popitem(last=False)

    def refuses(self, key: str, epoch: int) -> int | None:
        """The later epoch that is known, if a turn of this one comes too late; else older ones may come no more."""
        known = self._epochs.get(key, epoch)
        if epoch < known:
            return known
        self.tell(key, epoch)
        return None
