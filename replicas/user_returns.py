"""How many programs come back after an answer to their user.

Most clients do not report the end of a program: it answers its user, and no turn comes any more. The durations of
pauses that have ended say nothing of these programs, because they never end. So the programs that are silent count,
too: each with the probability that it would be back by now if it came back at all.
"""

from collections import OrderedDict
from collections.abc import Callable

from cluster.core.program import USER_REPLY
from cluster.durations.table import DurationTable

PRIOR = 10.0
"""Number of programs that are assumed to have come back before any is observed."""
MIN_OBSERVATIONS = 5
"""Number of observed replies from which on their durations are used."""
REPLY_S = 10.0
"""Scale of the replies' durations before that: a half of them takes longer. Chosen, not measured."""
SURE = 0.95
"""Probability to be back by now from which on a silent program counts as ended."""
MEMORY = 1000.0
"""Number of programs that are remembered: above it, the counts of earlier ones are halved."""
MAX_ENDED = 4096
"""Largest number of programs that count as ended and are still recognized if they come back."""
SAMPLE = 64
"""Number of silent programs that are looked at, evenly spaced by age."""
UPDATE_S = 0.5
"""Seconds between two estimates."""


class UserReturns:
    """Learns the share of programs that come back after an answer to their user. All times are in seconds."""

    def __init__(self) -> None:
        self._returned = 0.0
        self._ended = 0.0
        self._silent: OrderedDict[str, float] = OrderedDict()
        """Time of the answer of each program that has not come back yet, the oldest first."""
        self._given_up: OrderedDict[str, None] = OrderedDict()
        """Programs that were counted as ended."""
        self._share = 1.0
        self._next_s = float("-inf")

    def answered(self, key: str, now_s: float) -> None:
        """A program has answered its user, and has no turn in flight."""
        self._silent[key] = now_s
        self._silent.move_to_end(key)

    def returned(self, key: str) -> None:
        """A turn of a program has come, whatever the program waited for."""
        if self._silent.pop(key, None) is not None:
            self._returned += 1.0
        elif key in self._given_up:
            del self._given_up[key]
            self._returned += 1.0
            self._ended = max(0.0, self._ended - 1.0)
        else:
            return
        self._forget_early_ones()

    def ended(self, key: str, *, reported: bool) -> None:
        """A program has ended. One whose client reported that counts for neither side: it cost nothing."""
        if self._silent.pop(key, None) is not None and not reported:
            self._ended += 1.0
            self._forget_early_ones()
        self._given_up.pop(key, None)

    def share(self, durations: DurationTable, now_s: float) -> float:
        """Return the probability that a program comes back after its answer, in (0, 1].

        Args:
            durations: known durations of pauses.
            now_s: the current time.
        """
        if now_s < self._next_s:
            return self._share
        self._next_s = now_s + UPDATE_S
        back_by = _back_by(durations)
        while self._silent:
            key, since_s = next(iter(self._silent.items()))
            if back_by(now_s - since_s) < SURE:
                break
            self._give_up(key)
        since = list(self._silent.values())
        sample = since[:: -(-len(since) // SAMPLE)] if since else []
        missing = len(since) * sum(back_by(now_s - one) for one in sample) / len(sample) if sample else 0.0
        known = self._returned + PRIOR
        self._share = known / (known + self._ended + missing)
        return self._share

    def _give_up(self, key: str) -> None:
        del self._silent[key]
        self._ended += 1.0
        self._given_up[key] = None
        if len(self._given_up) > MAX_ENDED:
            self._given_up.popitem(last=False)
        self._forget_early_ones()

    def _forget_early_ones(self) -> None:
        if self._returned + self._ended > MEMORY:
            self._returned /= 2
            self._ended /= 2


def _back_by(durations: DurationTable) -> Callable[[float], float]:
    """Return the function P(back within t seconds | comes back) of t."""
    known = durations.tool(USER_REPLY)
    if known is not None and known.count >= MIN_OBSERVATIONS:
        return lambda seconds: 1.0 - known.survival(seconds)
    return lambda seconds: seconds / (REPLY_S + seconds) if seconds > 0 else 0.0
