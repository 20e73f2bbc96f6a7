"""One run of the bench in a terminal: progress, the table, and the files that were asked for."""

import asyncio
from pathlib import Path

from rich.console import Console

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
