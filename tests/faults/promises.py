"""What was promised for a fault, and what was measured: the rows of the table that `make faults` prints."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

Promised = Callable[..., None]
"""What the fixture `promised` gives."""
Name = tuple[str, str]
"""A fault and what was promised for it."""


class Limit(StrEnum):
    """How a measured value relates to the promised one."""

    EXACTLY = "="
    AT_MOST = "<="
    AT_LEAST = ">="


@dataclass(frozen=True, slots=True)
class Row:
    """One promise and how it went."""

    fault: str
    what: str
    limit: Limit
    promised: float
    measured: float
    unit: str
    test: str
    """Node id of the test that measured it."""
    first: float | None = None
    """What was measured at the first try, if the test ran again because it missed a time; None: this is the first."""

    @property
    def is_timed(self) -> bool:
        """Whether a busy machine alone could break it."""
        return self.unit in ("s", "ms", "x", "%/h")

    @property
    def kept(self) -> bool:
        """Whether the promise was."""
        match self.limit:
            case Limit.EXACTLY:
                return self.measured == self.promised
            case Limit.AT_MOST:
                return self.measured <= self.promised
            case Limit.AT_LEAST:
                return self.measured >= self.promised


Properties = list[tuple[str, Any]]
"""What pytest reports of a test beside its outcome, also where the test ran in another process."""
PROPERTY = "promise"
"""Of rows in JSON: pytest's workers can send text, but no enum."""


@dataclass(slots=True)
class Promises:
    """The rows of one test, which are among its properties."""

    is_long: bool
    """Times are promises, too. The short form leaves them out: on a busy machine it can judge none."""
    properties: Properties
    first: Mapping[Name, float] = field(default_factory=dict)
    """What was missed at the first try, if this is the second."""

    def measured(self, row: Row) -> None:
        """Note it, unless it is a time, or a ratio of times, in the short form.

        Raises:
            AssertionError: the promise was broken.
        """
        if row.is_timed and not self.is_long:
            return
        row = replace(row, first=self.first.get((row.fault, row.what)))
        self.properties.append((PROPERTY, json.dumps(asdict(row))))
        assert row.kept, in_words(row)


def rows_of(properties: Iterable[tuple[str, Any]]) -> list[Row]:
    """The rows among the properties of a test."""
    rows = [json.loads(value) for name, value in properties if name == PROPERTY]
    return [Row(**{**row, "limit": Limit(row["limit"])}) for row in rows]


def missed_times(properties: Iterable[tuple[str, Any]]) -> dict[Name, float]:
    """The times that a test has missed: what was measured, by fault and promise. Another promise is no time."""
    return {(row.fault, row.what): row.measured for row in rows_of(properties) if row.is_timed and not row.kept}


def in_words(row: Row) -> str:
    """A row in words."""
    return f"{row.fault}: {row.what} {row.limit} {row.promised:g} {row.unit}, measured {row.measured:.4g}"


def table(rows: Sequence[Row]) -> str:
    """Markdown; the last column names the test."""
    lines = ["| fault | promise | measured | kept | test |", "| --- | --- | --- | --- | --- |", *map(_line, rows)]
    return "\n".join(lines)


def _line(row: Row) -> str:
    promise = f"{row.what} {row.limit} {row.promised:g} {row.unit}".rstrip()
    kept = "yes" if row.kept else "NO"
    if row.first is not None:
        kept += f", at the second try (first: {row.first:.4g} {row.unit})"
    return f"| {row.fault} | {promise} | {row.measured:.4g} {row.unit} | {kept} | {row.test} |"


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed.

    Raises:
        ValueError: there are none.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
