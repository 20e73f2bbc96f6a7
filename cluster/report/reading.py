"""Reads the files of `caesura report`: records (`--record`) and summaries (`--json`) of bench, simulate and demo."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cluster.bench.record import Line, MemoryLine, ProgramLine, RunLine
from cluster.errors import ConfigError

SUMMARY_KEYS = {"policy", "rate", "goodput_programs", "attainment"}
"""Of a line of `--json`."""


@dataclass(slots=True)
class Run:
    """One policy at one rate, once: what was found, and where it is a record's, everything that was seen."""

    head: RunLine
    source: str
    """The name of the file."""
    programs: list[ProgramLine] = field(default_factory=list)
    memory: list[MemoryLine] = field(default_factory=list)

    @property
    def measured(self) -> Iterator[ProgramLine]:
        """The programs that were meant to arrive in the measured window."""
        begin_s, end_s = self.head.window_s
        return (program for program in self.programs if begin_s <= program.arrival_s < end_s)


@dataclass(frozen=True, slots=True)
class Column:
    """What is compared with its like: a policy, and the router and the setting where there are several."""

    policy: str
    router: str
    preset: str


@dataclass(frozen=True, slots=True)
class Runs:
    """All that was read."""

    runs: Sequence[Run]

    @property
    def columns(self) -> dict[Column, str]:
        """What is compared, in the order of the files, and what it is called: no longer than it must be."""
        found = list(dict.fromkeys(column_of(run) for run in self.runs))
        routers, presets = ({getattr(c, name) for c in found} for name in ("router", "preset"))
        return {
            column: ", ".join(
                [column.policy]
                + ([column.router] if len(routers) > 1 and column.router else [])
                + ([column.preset] if len(presets) > 1 else [])
            )
            for column in found
        }

    @property
    def rates(self) -> list[float]:
        """Offered programs per second, ascending."""
        return sorted({run.head.rate for run in self.runs})

    def of(self, column: Column, rate: float) -> list[Run]:
        """The runs of one column at one rate: its seeds and blocks."""
        return [run for run in self.runs if column_of(run) == column and run.head.rate == rate]

    def mean(self, column: Column, rate: float, *path: str) -> float | None:
        """Of a number of the summaries over seeds and blocks; None: no run knows it."""
        known = [value for run in self.of(column, rate) if (value := number(run.head.summary, *path)) is not None]
        return sum(known) / len(known) if known else None


def column_of(run: Run) -> Column:
    """Where it belongs."""
    return Column(run.head.policy, run.head.router, run.head.preset)


def number(summary: Mapping[str, Any], *path: str) -> float | None:
    """A number of a summary by its keys; None: it is not there."""
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def read(paths: Iterable[Path]) -> Runs:
    """All runs of the files, in their order.

    Raises:
        ConfigError: a file cannot be read, or is none of ours; the message names file and line.
    """
    runs = [run for path in paths for run in _read(path)]
    if not runs:
        raise ConfigError("there is no run in these files")
    # A run may be in a record and in a summary of its own: the record says more.
    detailed = {_identity(run) for run in runs if run.programs}
    return Runs([run for run in runs if run.programs or _identity(run) not in detailed])


def _identity(run: Run) -> tuple[object, ...]:
    return (column_of(run), run.head.rate, run.head.seed)


def _read(path: Path) -> list[Run]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    runs: list[Run] = []
    by_number: dict[int, Run] = {}
    lines = msgspec.json.Decoder(Line)
    for count, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            if b'"line"' not in raw[:40]:
                runs.append(Run(_of_summary(raw), path.name))
                continue
            line = lines.decode(raw)
            if isinstance(line, RunLine):
                by_number[line.run] = Run(line, path.name)
                runs.append(by_number[line.run])
            elif isinstance(line, ProgramLine):
                by_number[line.run].programs.append(line)
            else:
                by_number[line.run].memory.append(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path}, line {count}: neither a record nor a result: {error}") from error
        except KeyError as error:
            raise ConfigError(f"{path}, line {count}: it belongs to run {error}, which does not come before") from error
    return runs


def _of_summary(raw: bytes) -> RunLine:
    """A line of `--json`."""
    summary = msgspec.json.decode(raw)
    if not isinstance(summary, dict) or not summary.keys() >= SUMMARY_KEYS:
        raise ValueError("a result has at least the keys " + ", ".join(sorted(SUMMARY_KEYS)))
    simulation = summary.get("simulation") or {}
    return msgspec.convert(
        {
            "line": "run",
            "run": 0,
            "policy": summary["policy"],
            "router": summary.get("router", "") if simulation.get("replicas", 1) > 1 else "",
            "preset": summary.get("preset", ""),
            "rate": summary["rate"],
            "seed": summary.get("seed", 0),
            "window_s": (0.0, 0.0),
            "slo": simulation.get("slo") or {},
            "summary": summary,
            "versions": {},
            "command": summary.get("command", ""),
        },
        RunLine,
    )
