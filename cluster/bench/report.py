"""Shows a run: a progress bar while it lasts, then one table with a column a policy."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.bench.result import BenchResult
from cluster.bench.summary import Distribution, Summary, as_json, by_block, by_policy
from cluster.goodput import Outcome, ProgramRecord

UNKNOWN = "-"
STATISTICS = ("mean", "p50", "p95", "p99")

COUNTS: tuple[tuple[str, Callable[[Summary], float | None]], ...] = (
    ("programs offered", lambda s: s.goodput.offered_programs),
    ("  completed", lambda s: s.goodput.completed_programs),
    ("  failed", lambda s: s.outcomes[Outcome.FAILED]),
    ("  rejected", lambda s: s.outcomes[Outcome.REJECTED]),
    ("  timed out", lambda s: s.outcomes[Outcome.TIMED_OUT]),
    ("  unfinished", lambda s: s.outcomes[Outcome.UNFINISHED]),
)

RATES: tuple[tuple[str, Callable[[Summary], float | None]], ...] = (
    ("goodput, programs/s", lambda s: s.goodput.programs_per_s),
    ("goodput, requests/s", lambda s: s.goodput.requests_per_s),
    ("SLO attainment, programs", lambda s: s.goodput.attainment),
    ("SLO attainment, requests", lambda s: s.goodput.attainment_requests),
)

DISTRIBUTIONS = (
    ("TTFT, s", "ttft_s"),
    ("TPOT, s", "tpot_s"),
    ("normalised latency, s/token", "norm_latency_s"),
    ("JCT without tools, s", "jct_s"),
    ("JCT with tools, s", "jct_wall_s"),
    ("scheduling bubble, s/program", "bubble_s"),
    ("recomputed tokens/program", "recomputed_tokens"),
    ("reused tokens/program", "reused_tokens"),
    ("client lag, s", "client_lag_s"),
)


class ProgressBar:
    """A `BenchProgress` on a terminal; use it as a context manager."""

    def __init__(self, console: Console, blocks: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[ended]}"), console=console)
        self._blocks = blocks
        self._outcomes: Counter[Outcome] = Counter()
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def block(self, policy: str, block: int, programs: int) -> None:
        """Begin a new bar."""
        self._outcomes.clear()
        name = f"block {block + 1}/{self._blocks} {policy}"
        self._task = self._progress.add_task(name, total=programs, ended="")

    def ended(self, program: ProgramRecord) -> None:
        """Advance it."""
        self._outcomes[program.outcome] += 1
        if self._task is not None:
            said = ", ".join(f"{count} {outcome.value}" for outcome, count in self._outcomes.items())
            self._progress.update(self._task, advance=1, ended=said)


def print_report(result: BenchResult, console: Console) -> None:
    """The table, the blocks one by one, the errors, what was left out, and the command."""
    summaries = by_policy(result)
    console.print(_table(result, summaries))
    if result.settings.blocks > 1:
        console.print(_blocks_table(result))
    for line in _footnotes(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_json_lines(result: BenchResult, path: Path) -> None:
    """One object a policy, one a line."""
    lines = [json.dumps(as_json(summary, result)) for summary in by_policy(result)]
    path.write_text("".join(f"{line}\n" for line in lines))


def _table(result: BenchResult, summaries: list[Summary]) -> Table:
    settings = result.settings
    title = f"{result.workload.name} on {result.model}: {settings.rate_per_s:g} programs/s, {settings.arrivals}"
    table = Table(title=title, caption="(xN): relative to the first policy. Latencies: OK turns, completed programs.")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.policy, justify="right")
    first = summaries[0]
    for label, count in COUNTS:
        table.add_row(label, *(_number(count(summary)) for summary in summaries))
    table.add_section()
    for label, rate in RATES:
        table.add_row(label, *(_cell(rate(s), rate(first), s is first) for s in summaries))
    for label, key in DISTRIBUTIONS:
        table.add_section()
        for index, statistic in enumerate(STATISTICS):
            cells = [
                _cell(_of(s.distributions[key], statistic), _of(first.distributions[key], statistic), s is first)
                for s in summaries
            ]
            table.add_row(f"{label if index == 0 else '':<29}{statistic}", *cells)
    return table


def _blocks_table(result: BenchResult) -> Table:
    table = Table(title="block by block, means (the noise)")
    for column in ("policy", "block", "goodput/s", "attainment", "TTFT, s", "JCT, s", "JCT p95, s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in result.settings.policy_names:
        for number, summary in enumerate(by_block(result, policy), start=1):
            found, goodput = summary.distributions, summary.goodput
            values = (goodput.programs_per_s, goodput.attainment, found["ttft_s"].mean, found["jct_s"].mean)
            table.add_row(policy, str(number), *map(_number, (*values, found["jct_s"].p95)))
        table.add_section()
    return table


def _footnotes(result: BenchResult) -> list[str]:
    settings, workload = result.settings, result.workload
    lines = [f"Programs in the pool: {len(workload.programs)}."]
    if workload.dropped:
        lines.append(f"Dropped, because they need more than {settings.shaping.max_context} tokens: {workload.dropped}.")
    lines += [f"Note: {note}." for note in workload.notes]
    warmup = Counter(program.outcome for block in result.blocks for program in block.warmup)
    if warmup:
        said = ", ".join(f"{count} {outcome.value}" for outcome, count in warmup.items())
        lines.append(f"In the warm-up, not measured: {sum(warmup.values())} programs ({said}).")
    errors = Counter(
        (block.policy, turn.error)
        for block in result.blocks
        for program in (*block.warmup, *block.measured)
        for turn in program.turns
        if turn.error is not None
    )
    lines += [f"Error, {policy}, {count} times: {error}" for (policy, error), count in errors.most_common(5)]
    if settings.command:
        lines.append(f"Command: {settings.command}")
    return lines


def _of(distribution: Distribution, statistic: str) -> float | None:
    value: float | None = getattr(distribution, statistic)
    return value


def _cell(value: float | None, first: float | None, is_first: bool) -> str:
    if is_first or value is None or not first:
        return _number(value)
    return f"{_number(value)} (x{value / first:.2f})"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.1e}"
