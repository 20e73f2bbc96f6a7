"""`caesura predictor`: the models that forecast lengths, tools and durations."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.file_lists import FileListsCommand

app = typer.Typer(no_args_is_help=True, help="Models that forecast turns and pauses.")

Traces = Annotated[list[Path], typer.Option(metavar="FILE...", help="Programs: .jsonl or .jsonl.gz.")]
Text = Annotated[list[Path] | None, typer.Option(metavar="FILE...", help="Texts of their turns.")]
SplitSeed = Annotated[int, typer.Option(min=0, help="Which groups of programs are tested on.")]


@app.callback()
def predictor() -> None:
    """Models that forecast turns and pauses."""


@app.command(cls=FileListsCommand)
def evaluate(
    traces: Traces,
    text: Text = None,
    split_seed: SplitSeed = 0,
    models: Annotated[str, typer.Option(help="a,b, or all: every registered model.")] = "all",
    json: Annotated[Path | None, typer.Option(help="Write one JSON line a model and source.")] = None,
) -> None:
    """Fit models on some groups of programs, and say how good they are on the others, beside baselines."""
    from cluster.commands.bench import writable
    from cluster.registry import PREDICTORS
    from predictor_service.evaluate import evaluated
    from predictor_service.evaluation_report import PAPERS, json_lines, tables
    from predictor_service.examples import read_programs

    writable(json, None)
    programs = read_programs(traces, text or ())
    names = tuple(PREDICTORS) if models == "all" else tuple(models.split(","))
    found = evaluated(programs, split_seed, names, done=lambda name: typer.echo(f"{name}: done", err=True))
    typer.echo(f"{tables(found)}\n\n{PAPERS}")
    if json is not None:
        command = shlex.join(["caesura", *sys.argv[1:]])
        json.write_text(json_lines(found, {"command": command, "split_seed": split_seed}), encoding="utf-8")
