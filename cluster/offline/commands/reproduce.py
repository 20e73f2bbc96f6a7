"""`caesura reproduce`: a paper's evaluation in its own setting, with the published numbers beside ours."""

import os
import shlex
import sys
from collections.abc import Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cluster.core.errors import ConfigError
from cluster.offline.commands._common import Outputs

ALL = "all"
"""In place of names of factors: all of them."""


def reproduce(
    paper: Annotated[str, typer.Argument(help="infercept, lamps, mars, augserve or continuum.")],
    traces: Annotated[Path, typer.Option(help="Folder of the traces, NAME.jsonl.gz.")],
    figure: Annotated[str | None, typer.Option(help="One table or figure, such as table3. Default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer loads and one seed.")] = False,
    factors: Annotated[
        str, typer.Option(help="Suspected causes to change in further runs: names of factors with commas, or all.")
    ] = "",
    seed: Annotated[str, typer.Option(help="One, or several with commas; their mean is shown.")] = "0,1,2",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on a core.")] = 2,
    resume: Annotated[
        Path | None, typer.Option(help="Keep finished runs in this folder, and go on from those that are there.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write SVG plots into this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Run a paper's evaluation in its own setting, and print the published numbers beside ours."""
    from rich.console import Console

    from cluster.offline.bench.terminal import RunProgress, print_table

    # Both are read once, when vLLM is imported: here, and in the processes that --jobs starts.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with RunProgress(quiet=quiet) as progress:
        from cluster.offline.reproduce.comparison import Results, compare
        from cluster.offline.reproduce.plan import jobs_of, paper_of
        from cluster.offline.reproduce.report import as_json, summary, table_of, write_json, write_plots
        from cluster.offline.reproduce.running import run_all

        Outputs(json, None, plots).check()
        plan = paper_of(paper)
        if figure is not None and figure not in plan.figures:
            raise ConfigError(f"--figure: {figure!r} is none of {', '.join(plan.figures)}")
        chosen = {name: one for name, one in plan.figures.items() if figure in (None, name)}
        changed = _factors(factors, {key for one in chosen.values() for key in one.factors})
        runs = jobs_of(chosen, (0,) if quick else _seeds(seed), quick=quick, factors=changed)
        if not runs:
            raise ConfigError(f"--quick: it runs no load of {figure}; leave it out")
        progress.begin("runs", len(runs))
        measured = []
        for run in run_all(runs, chosen, traces, jobs, resume):
            measured.append(run)
            progress.advance(f"{run.job.figure}: {run.job.system} at {run.job.load}")
        results = Results(measured)
    console = Console()
    rows = []
    for name, one in chosen.items():
        found = compare(name, one, results)
        if not found:
            continue
        rows += found
        print_table(table_of(one, found, changed), console)
        for path in write_plots(name, one, results, plots) if plots is not None else ():
            console.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)
        for missing in one.missing:
            console.print(f"Not here: {missing}", markup=False, highlight=False, soft_wrap=True)
    for missing in plan.missing if figure is None else ():
        console.print(f"Not here: {missing}", markup=False, highlight=False, soft_wrap=True)
    console.print(summary(rows), highlight=False)
    if json is not None:
        made = {"command": shlex.join(["caesura", *sys.argv[1:]]), "date": datetime.now(UTC).date().isoformat()}
        write_json(json, as_json(paper, plan, rows, results, made))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seed: {error}") from None


def _factors(text: str, known: Set[str]) -> Set[str]:
    """Return the factors that are named. A figure of several may lack some."""
    if text == ALL:
        return known
    named = {part.strip() for part in text.split(",")} - {""}
    if unknown := named - known:
        raise ConfigError(f"--factors: {', '.join(sorted(unknown))} is none of {', '.join(sorted(known))}, or {ALL}")
    return named
