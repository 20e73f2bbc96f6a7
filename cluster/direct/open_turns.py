"""The direct data plane: turns that the router has placed, until their replica says that they are over."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from cluster.core.clock import Clock
from router.placement import Placement

SILENCE_S = 15.0
"""A turn is given up so long after it was placed if its replica has not said since that it has it: the request did not
arrive, or the replica is gone. Replicas say so every `cluster.direct.turn_reports.PERIOD_S`."""


@dataclass(frozen=True, slots=True)
class _OpenTurn:
    placement: Placement
    replica: str
    since_s: float


class OpenTurns:
    """Keeps each placement until its turn is over, or nobody knows of it any more; then ends it.

    Args:
        clock: measures silence.
        name: of this router; begins the names of its turns.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._numbers = count()
        self._open: dict[str, _OpenTurn] = {}
        self._heard_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, placement: Placement, replica: str) -> str:
        """The turn's name, which its replica will say; unique among all routers."""
        name = f"{self._name}-{next(self._numbers)}"
        self._open[name] = _OpenTurn(placement, replica, self._clock.now_s())
        return name

    def told(self, replica: str, ended: Sequence[tuple[str, bool]], there: Iterable[str] | None) -> None:
        """What a replica says of the turns that it was brought; those of other routers among them.

        Args:
            replica: its unique id.
            ended: the names of those that are over, each with whether it came to its proper end.
            there: those that are under way; None: it does not say.
        """
        for name, complete in ended:
            if (turn := self._open.pop(name, None)) is not None:
                turn.placement.end(complete=complete)
        if there is not None:
            now_s, under_way = self._clock.now_s(), set(there)
            self._heard_s[replica] = now_s
            self._give_up(
                name
                for name, turn in self._open.items()
                if turn.replica == replica and name not in under_way and turn.since_s < now_s - SILENCE_S
            )

    def sweep(self) -> None:
        """Give up the turns of replicas that say nothing; to be called every few seconds."""
        heard_after_s = self._clock.now_s() - SILENCE_S
        self._heard_s = {replica: at_s for replica, at_s in self._heard_s.items() if at_s >= heard_after_s}
        self._give_up(
            name
            for name, turn in self._open.items()
            if turn.since_s < heard_after_s and turn.replica not in self._heard_s
        )

    def _give_up(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._open.pop(name).placement.end()
