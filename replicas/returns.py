"""How many programs come back after a pause, by what they wait for.

Most clients do not report the end of a program. Its last turn answers the user, or calls a tool of which only the
arguments were wanted, and no turn comes any more. The durations of pauses that have ended say nothing of these
programs, because their pauses never end. So the programs that are silent count, too: the share of those that come back
is the one that makes the returns and the silences seen so far most likely.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from cluster.core.program import without_class
from cluster.durations.table import DurationTable

PRIOR = 10.0
"""Number of programs that are assumed to have come back before any is observed."""
MIN_OBSERVATIONS = 5
"""Number of observed pauses from which on their durations are used."""
PAUSE_S = 10.0
"""Scale of the durations before that: a half of the pauses takes longer. Chosen, not measured."""
SURE = 0.95
"""Probability of an end from which on a silent program counts as ended."""
MEMORY = 1000.0
"""Number of programs that are remembered of each tool: above it, the counts of earlier ones are halved."""
MAX_TOOLS = 256
"""Largest number of tools. Beyond it, the one that was called least recently is forgotten."""
MAX_ENDED = 4096
"""Largest number of programs of each tool that count as ended and are still recognized if they come back."""
SAMPLE = 32
"""Number of silent programs that are looked at, evenly spaced by age."""
BISECTIONS = 14
"""Steps in which the share is found, to 1 / 16,384."""
UPDATE_S = 0.5
"""Seconds between two estimates for a tool."""


class Returns:
    """Learns the share of programs that come back after a pause. All times are in seconds."""

    def __init__(self) -> None:
        self._tools: OrderedDict[str, _Tool] = OrderedDict()
        self._waits_for: dict[str, str] = {}
        """The tool of each program that is silent."""
        self._given_up: list[str] = []

    def paused(self, key: str, tool: str, now_s: float) -> None:
        """A program waits.

        Args:
            key: the program's key.
            tool: key of what it waits for, as in tables of durations.
            now_s: the current time.
        """
        tool = without_class(tool)
        self._waits_for[key] = tool
        self._tool(tool).silent[key] = now_s

    def returned(self, key: str) -> None:
        """A turn of a program has come."""
        if (known := self._tools.get(self._waits_for.pop(key, ""))) is not None:
            known.returned(key)

    def ended(self, key: str, *, reported: bool) -> None:
        """A program has ended. If its client reported that, it counts for neither side, because it cost nothing."""
        if (known := self._tools.get(self._waits_for.pop(key, ""))) is not None:
            known.gone(key, counts=not reported)

    def share(self, tool: str, durations: DurationTable, now_s: float) -> float:
        """Return the probability that a program that begins to wait for a tool comes back, in (0, 1].

        Args:
            tool: key of what it waits for.
            durations: known durations of pauses.
            now_s: the current time.
        """
        tool = without_class(tool)
        known = self._tools.get(tool)
        return 1.0 if known is None else known.share(_longer(tool, durations), now_s, self._given_up)

    def take_given_up(self) -> list[str]:
        """Return the programs that have begun to count as ended since the last call, the first first."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _tool(self, tool: str) -> "_Tool":
        known = self._tools.get(tool)
        if known is None:
            known = self._tools[tool] = _Tool()
            if len(self._tools) > MAX_TOOLS:
                self._tools.popitem(last=False)
        else:
            self._tools.move_to_end(tool)
        return known


class _Tool:
    """What is known of the programs that wait, or waited, for one tool."""

    def __init__(self) -> None:
        self.silent: OrderedDict[str, float] = OrderedDict()
        """Beginning of the pause of each program that has not come back yet, the oldest first."""
        self.given_up: OrderedDict[str, None] = OrderedDict()
        """Programs that were counted as ended."""
        self._returned = 0.0
        self._ended = 0.0
        self._share = 1.0
        self._next_s = float("-inf")

    def returned(self, key: str) -> None:
        if self.silent.pop(key, None) is None:
            if key not in self.given_up:
                return
            del self.given_up[key]
            self._ended = max(0.0, self._ended - 1.0)
        self._returned += 1.0
        self._forget_early_ones()

    def gone(self, key: str, *, counts: bool) -> None:
        if self.silent.pop(key, None) is not None and counts:
            self._ended += 1.0
            self._forget_early_ones()
        self.given_up.pop(key, None)

    def share(self, longer: Callable[[float], float], now_s: float, given_up: list[str]) -> float:
        """See `Returns.share`. Programs that begin to count as ended are added to ``given_up``."""
        if now_s < self._next_s:
            return self._share
        self._next_s = now_s + UPDATE_S
        if not self.silent and not self._ended:
            self._share = 1.0
            return 1.0
        since = list(self.silent.values())
        sample = [longer(now_s - one) for one in (since[:: -(-len(since) // SAMPLE)] if since else ())]
        self._share = _most_likely_share(self._returned + PRIOR, self._ended, len(since), sample)
        self._give_up(longer, now_s, given_up)
        return self._share

    def _give_up(self, longer: Callable[[float], float], now_s: float, given_up: list[str]) -> None:
        while self.silent:
            key, since_s = next(iter(self.silent.items()))
            if _is_end(1.0 - self._share, longer(now_s - since_s)) < SURE:
                return
            del self.silent[key]
            self._ended += 1.0
            self.given_up[key] = None
            given_up.append(key)
            if len(self.given_up) > MAX_ENDED:
                self.given_up.popitem(last=False)
            self._forget_early_ones()

    def _forget_early_ones(self) -> None:
        if self._returned + self._ended > MEMORY:
            self._returned /= 2
            self._ended /= 2


def _most_likely_share(returned: float, ended: float, silent: int, sample: Sequence[float]) -> float:
    """Return the share of programs that come back.

    Args:
        returned: number of programs that came back.
        ended: number of programs that are known to have ended.
        silent: number of programs that are silent.
        sample: for some of them, the share of pauses that are longer than their silence.
    """
    each = silent / len(sample) if sample else 0.0

    def rises(ends: float) -> bool:
        """Whether the likelihood still rises at this share of ends. It is concave."""
        silences = sum((1.0 - longer) / (ends + (1.0 - ends) * longer) for longer in sample if longer < 1.0)
        return ended / ends + each * silences > returned / (1.0 - ends)

    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) else (low, middle)
    return 1.0 - low


def _is_end(ends: float, longer: float) -> float:
    """Return P(the program has ended | it is silent), by Bayes' rule.

    Args:
        ends: share of pauses that are an end.
        longer: share of the other pauses that are longer than the silence.
    """
    return ends / (ends + (1.0 - ends) * longer) if ends > 0 else 0.0


def _longer(tool: str, durations: DurationTable) -> Callable[[float], float]:
    """Return the function S(t), the share of pauses longer than t. Beyond all observations it decreases as 1 / t."""
    known = durations.tool(tool)
    if known is None or known.count < MIN_OBSERVATIONS:
        return lambda seconds: PAUSE_S / (PAUSE_S + max(0.0, seconds))

    def longer(seconds: float) -> float:
        return known.survival(seconds) or known.max_s / max(seconds, known.max_s, 1e-3) / (known.count + 1)

    return longer
