"""What one ingress sees of the demand for a model, for its autoscaler. Pure; times in seconds."""

from collections import deque

from cluster.core.scaling_report import Demand

RECENT_S = 20.0
"""Turns that ended within this time count for whether SLOs are met."""
TURNS_WITHIN_S = 10.0
"""The work of turns is averaged over this time. Longer averages are the autoscaling policy's."""
PROGRAMS_WITHIN_S = 30.0
"""The work of programs is averaged over this time, since programs are fewer and larger."""


class SlidingSum:
    """The sum of amounts over the last ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._amounts: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, now_s: float, amount: float) -> None:
        """Add an amount. Amounts within a hundredth of the time are kept as one, which bounds their number."""
        if self._amounts and now_s - self._amounts[-1][0] < self._seconds / 100:
            at_s, before = self._amounts.pop()
            self._amounts.append((at_s, before + amount))
        else:
            self._drop_old(now_s)
            self._amounts.append((now_s, amount))
        self._sum += amount

    def value(self, now_s: float) -> float:
        """Return the sum at this time."""
        self._drop_old(now_s)
        return max(0.0, self._sum) if self._amounts else 0.0

    def per_s(self, now_s: float) -> float:
        """Return the mean amount in each second."""
        return self.value(now_s) / self._seconds

    def _drop_old(self, now_s: float) -> None:
        while self._amounts and now_s - self._amounts[0][0] > self._seconds:
            self._sum -= self._amounts.popleft()[1]
        if not self._amounts:
            self._sum = 0.0  # without what rounding has left


class DemandMeter:
    """The work that was sent to replicas lately, and whether turns met their SLO."""

    def __init__(self) -> None:
        self._turn_work = SlidingSum(TURNS_WITHIN_S)
        self._program_work = SlidingSum(PROGRAMS_WITHIN_S)
        self._programs = SlidingSum(PROGRAMS_WITHIN_S)
        self._programs_s = SlidingSum(PROGRAMS_WITHIN_S)
        self._ended = SlidingSum(RECENT_S)
        self._missed = SlidingSum(RECENT_S)
        self._counted = (0, 0)

    def turn(self, now_s: float, work_s: float) -> None:
        """A turn is sent to a replica, which it occupies for so long."""
        self._turn_work.add(now_s, work_s)

    def program(self, now_s: float, work_s: float, lasts_s: float) -> None:
        """A new program is admitted. All of its turns take so much work, over so long a time."""
        self._program_work.add(now_s, work_s)
        self._programs.add(now_s, 1.0)
        self._programs_s.add(now_s, lasts_s)

    def ended(self, now_s: float, turns: int, missed: int) -> None:
        """Take the numbers of turns that have ended, and of those that missed their SLO, since the ingress started."""
        self._ended.add(now_s, float(turns - self._counted[0]))
        self._missed.add(now_s, float(missed - self._counted[1]))
        self._counted = (turns, missed)

    def demand(self, now_s: float, queued_work_s: float, queued_tokens: float) -> Demand:
        """Return the demand now.

        Args:
            now_s: the time.
            queued_work_s: work of the turns that wait for admission.
            queued_tokens: KV that their programs need.
        """
        programs = self._programs.value(now_s)
        return Demand(
            turn_work=self._turn_work.per_s(now_s),
            program_work=self._program_work.per_s(now_s),
            program_s=self._programs_s.value(now_s) / programs if programs else 0.0,
            queued_work_s=queued_work_s,
            queued_tokens=queued_tokens,
            turns=self._ended.value(now_s),
            missed=self._missed.value(now_s),
            at_s=now_s,
        )
