"""Reads the files of `caesura report`: records (`--record`) and summaries (`--json`) of bench, simulate and demo."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cluster.core.errors import ConfigError
from cluster.offline.bench.metrics import mean, number
from cluster.offline.bench.record import Line, MemoryLine, ProgramLine, RunLine

SUMMARY_KEYS = {"policy", "rate", "goodput_programs", "attainment"}
"""Keys that each line of `--json` has."""


@dataclass(slots=True)
class Run:
    """One run: its summary and, if it was recorded, its programs and memory samples."""

    head: RunLine
    source: str
    """Name of the file."""
    programs: list[ProgramLine] = field(default_factory=list)
    memory: list[MemoryLine] = field(default_factory=list)
    variant: str = ""
    """See `Column`."""

    @property
    def measured(self) -> Iterator[ProgramLine]:
        """The programs with an intended arrival in the measured window."""
        begin_s, end_s = self.head.window_s
        return (program for program in self.programs if begin_s <= program.arrival_s < end_s)


@dataclass(frozen=True, slots=True)
class Column:
    """A compared configuration: a policy with its router and preset."""

    policy: str
    router: str
    preset: str
    variant: str = ""
    """Its file, if another file has runs of the same with other settings."""


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs that were read."""

    runs: Sequence[Run]

    @property
    def columns(self) -> dict[Column, str]:
        """The compared configurations in the order of the files, each with a short and unique label."""
        found = list(dict.fromkeys(column_of(run) for run in self.runs))
        routers, presets = ({getattr(c, name) for c in found} for name in ("router", "preset"))
        return {
            column: ", ".join(
                [column.policy]
                + ([column.router] if len(routers) > 1 and column.router else [])
                + ([column.preset] if len(presets) > 1 else [])
                + ([column.variant] if column.variant else [])
            )
            for column in found
        }

    @property
    def rates(self) -> list[float]:
        """Offered programs per second, ascending."""
        return sorted({run.head.rate for run in self.runs})

    def of(self, column: Column, rate: float) -> list[Run]:
        """Return the runs of one column at one rate: its seeds and blocks."""
        return [run for run in self.runs if column_of(run) == column and run.head.rate == rate]

    def mean(self, column: Column, rate: float, *path: str) -> float | None:
        """Return the mean of a number of the summaries over seeds and blocks; None if no run has it."""
        return mean([number(run.head.summary, *path) for run in self.of(column, rate)])


def column_of(run: Run) -> Column:
    """Return the column to which a run belongs."""
    return Column(run.head.policy, run.head.router, run.head.preset, run.variant)


def read(paths: Iterable[Path]) -> Runs:
    """Read all runs of the files, in their order.

    Raises:
        ConfigError: a file cannot be read, or has another format; the message names the file and the line.
    """
    runs = [run for path in paths for run in runs_of(_lines(path), path.name)]
    if not runs:
        raise ConfigError("there is no run in these files")
    # A run may be in a record and in a summary. The record is used, because it contains more.
    detailed = {(_identity(run), run.head.command) for run in runs if run.programs}
    kept = [run for run in runs if run.programs or (_identity(run), run.head.command) not in detailed]
    _separate(kept)
    return Runs(kept)


def _identity(run: Run) -> tuple[object, ...]:
    return (column_of(run), run.head.rate, run.head.seed)


def _separate(runs: Sequence[Run]) -> None:
    """Name the file in the columns whose runs are not seeds of one comparison: files have the same seed of them."""
    files: dict[tuple[object, ...], set[str]] = {}
    for run in runs:
        files.setdefault(_identity(run), set()).add(run.source)
    several = {column for (column, *_), sources in files.items() if len(sources) > 1}
    for run in runs:
        if column_of(run) in several:
            run.variant = run.source


def runs_of(lines: Iterable[Line], source: str = "") -> list[Run]:
    """Group lines into runs. The `RunLine` of each run must come before its other lines."""
    runs: dict[int, Run] = {}
    for line in lines:
        if isinstance(line, RunLine):
            runs[line.run] = Run(line, source)
        elif isinstance(line, ProgramLine):
            runs[line.run].programs.append(line)
        else:
            runs[line.run].memory.append(line)
    return list(runs.values())


def _lines(path: Path) -> Iterator[Line]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    known: set[int] = set()
    decoder = msgspec.json.Decoder(Line)
    for count, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw) if b'"line"' in raw[:40] else _of_summary(raw, -count)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path}, line {count}: neither a record nor a result: {error}") from error
        if isinstance(line, RunLine):
            known.add(line.run)
        elif line.run not in known:
            raise ConfigError(f"{path}, line {count}: it belongs to run {line.run}, which does not come before")
        yield line


def _of_summary(raw: bytes, number: int) -> RunLine:
    """Make the line of a run from a line of `--json`."""
    summary = msgspec.json.decode(raw)
    if not isinstance(summary, dict) or not summary.keys() >= SUMMARY_KEYS:
        raise ValueError("a result has at least the keys " + ", ".join(sorted(SUMMARY_KEYS)))
    simulation = summary.get("simulation") or {}
    return msgspec.convert(
        {
            "line": "run",
            "run": number,
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
