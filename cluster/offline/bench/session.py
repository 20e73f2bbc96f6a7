"""One run of the bench in a terminal: progress, the table, and the files that were asked for."""

import asyncio
from pathlib import Path

from rich.console import Console

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome
from cluster.offline.bench.record import bench_lines, write
from cluster.offline.bench.runner import run_bench
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.tables import print_report, write_json_lines
from cluster.offline.bench.terminal import RunProgress


def run_in_terminal(
    settings: BenchSettings,
    *,
    json_lines: Path | None,
    record: Path | None,
    plots: Path | None,
    verbose: bool,
    quiet: bool,
) -> None:
    """Replay the programs, print the report and write the files.

    Args:
        settings: what is replayed.
        json_lines: file for one JSON line a policy; None: it is not written.
        record: file for all programs and memory; None: it is not written.
        plots: folder for SVG plots; None: they are not written.
        verbose: whether everything that was measured is printed.
        quiet: whether nothing is printed.

    Raises:
        ConfigError: the server cannot be reached, cannot switch to a policy, or served no turn.
    """
    console = Console(quiet=quiet)
    with RunProgress(settings.blocks, quiet=quiet) as progress:
        result = asyncio.run(run_bench(settings, progress))
    print_report(result, console, verbose=verbose)
    if json_lines is not None:
        write_json_lines(result, json_lines)
    if record is not None:
        write(bench_lines(result), record)
    if plots is not None:
        from cluster.offline.report.plots import write_plots
        from cluster.offline.report.reading import Runs, runs_of

        for path in write_plots(Runs(runs_of(bench_lines(result))), plots):
            console.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)
    turns = [turn for block in result.blocks for program in (*block.warmup, *block.measured) for turn in program.turns]
    if turns and not any(turn.outcome is Outcome.OK for turn in turns):
        error = next((turn.error for turn in turns if turn.error is not None), "no turn ended in time")
        raise ConfigError(f"--url: {settings.url} served no turn: {error}")
