"""The usage of each program by day, as a replica writes it to the store.

A bill has all that a program has used in a day on this replica so far. It is sent again whenever it grows, and replaces
what was sent before, so that a repeated or lost call changes no sum. A bill stays here until the replica acknowledges
that it was written.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from time import time

from cluster.core.usage import OTHER_PROGRAMS, DayUsage, ProgramUsage
from replicas.gpu_time import NAMES, GpuTime

MAX_BILLS = 5000
"""Largest number of bills of a day. What comes later is added to one bill of its tenant, `OTHER_PROGRAMS`."""
MAX_UNWRITTEN = 20_000
"""Largest number of bills that wait to be written. The oldest are lost."""
MAX_SENT = 256
"""Largest number of bills of one exchange."""


@dataclass(slots=True)
class Bill(GpuTime):
    """What a program has used in a day."""

    number: int = 0
    day: str = ""
    tenant: str = ""
    program: str = ""
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    changed: Callable[["Bill"], None] = field(default=lambda _: None, repr=False, compare=False)

    def add(self, other: GpuTime) -> None:
        """Add other times to these."""
        GpuTime.add(self, other)
        self.changed(self)

    def turn_ended(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count a turn with its tokens."""
        self.turns += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += output_tokens
        self.changed(self)

    def as_usage(self) -> DayUsage:
        """Return it as it is now, to the microsecond."""
        counts = self.turns, self.prompt_tokens, self.cached_tokens, self.output_tokens
        seconds = (round(getattr(self, name), 6) for name in NAMES)
        return DayUsage(self.number, self.day, ProgramUsage(self.tenant, self.program, *counts, *seconds))


class Bills:
    """The bills of one replica.

    Args:
        wall: returns the Unix time in seconds.
    """

    def __init__(self, wall: Callable[[], float] = time) -> None:
        self._wall = wall
        self._day_number = -1
        self._day = ""
        self._of_day: dict[tuple[str, str], Bill] = {}
        self._number = self._revision = 0
        self._unwritten: OrderedDict[int, tuple[int, Bill]] = OrderedDict()
        """Bills that have grown, by number, with the revision of their last growth, the oldest first."""
        self.lost = 0
        """Number of bills whose last growth was never written."""

    def of(self, tenant: str, program: str) -> Bill:
        """Return today's bill of a program. An empty ``program``: of the tenant's requests that belong to none."""
        day_number = int(self._wall() // 86400)
        if day_number != self._day_number:
            self._day_number = day_number
            self._day = datetime.fromtimestamp(86400 * day_number, UTC).strftime("%Y-%m-%d")
            self._of_day = {}
        bill = self._of_day.get((tenant, program))
        if bill is None and len(self._of_day) >= MAX_BILLS:
            program = OTHER_PROGRAMS
            bill = self._of_day.get((tenant, program))
        if bill is None:
            self._number += 1
            bill = Bill(number=self._number, day=self._day, tenant=tenant, program=program, changed=self._changed)
            self._of_day[tenant, program] = bill
        return bill

    def since(self, written: int | None) -> tuple[int, list[DayUsage]]:
        """Return bills that have grown and are not written, at most `MAX_SENT`, and the revision that they reach.

        Args:
            written: the revision up to which all are written. None: the replica does not want any.
        """
        if written is None:
            return 0, []
        while self._unwritten and next(iter(self._unwritten.values()))[0] <= written:
            self._unwritten.popitem(last=False)
        sent = list(islice(self._unwritten.values(), MAX_SENT))
        return (sent[-1][0] if sent else written), [bill.as_usage() for _, bill in sent]

    def _changed(self, bill: Bill) -> None:
        self._revision += 1
        self._unwritten[bill.number] = self._revision, bill
        self._unwritten.move_to_end(bill.number)
        if len(self._unwritten) > MAX_UNWRITTEN:
            self._unwritten.popitem(last=False)
            self.lost += 1
