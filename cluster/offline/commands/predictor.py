"""`caesura predictor`: the models that predict lengths, tools and durations."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.core.errors import ConfigError, RunStoreUnavailable
from cluster.core.program import DEFAULT_TENANT
from cluster.offline.commands._common import FileListsCommand

app = typer.Typer(no_args_is_help=True, help="Models that predict turns and pauses.")

Traces = Annotated[list[Path], typer.Option(metavar="FILE...", help="Programs: .jsonl or .jsonl.gz.")]
Text = Annotated[list[Path] | None, typer.Option(metavar="FILE...", help="Texts of their turns.")]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Checkpoint of the model encoder: a directory with config, safetensors, tokenizer."
    ),
]
SplitSeed = Annotated[int, typer.Option(min=0, help="Which groups of programs are tested on.")]


@app.callback()
def predictor() -> None:
    """Models that predict turns and pauses."""


@app.command(cls=FileListsCommand)
def evaluate(
    traces: Traces,
    text: Text = None,
    split_seed: SplitSeed = 0,
    models: Annotated[str, typer.Option(help="a,b, or all: every registered model; encoder only with --base.")] = "all",
    bundle: Annotated[
        Path | None, typer.Option(help="A model that was trained before; it is not fitted again.")
    ] = None,
    base: Base = None,
    json: Annotated[Path | None, typer.Option(help="Write one JSON line a model and source.")] = None,
) -> None:
    """Fit models to some groups of programs, and score their forecasts of the others, beside baselines.

    Scores are of tokens generated, seconds and tokens of tool calls, the next tool, and what a program has left.
    """
    from cluster.core.registry import PREDICTORS
    from cluster.offline.commands._common import Outputs
    from predictor_service.bundle import load_model
    from predictor_service.evaluation import ENCODER, check_unseen, evaluated
    from predictor_service.examples import read_programs
    from predictor_service.scores import PAPERS, json_lines, tables

    Outputs(json).check()
    ready: dict[str, Any] = {}
    if bundle is not None:
        stored = load_model(bundle)
        check_unseen(stored, split_seed)
        ready[stored.name] = stored.model
    programs = read_programs(traces, text or ())
    everything = tuple(name for name in PREDICTORS if name != ENCODER or base is not None)
    names = everything if models == "all" else tuple(models.split(","))
    names += tuple(name for name in ready if name not in names)
    found = evaluated(programs, split_seed, names, ready, base, lambda name: typer.echo(f"{name}: done", err=True))
    typer.echo(f"{tables(found)}\n\n{PAPERS}")
    if json is not None:
        command = shlex.join(["caesura", *sys.argv[1:]])
        json.write_text(json_lines(found, {"command": command, "split_seed": split_seed}), encoding="utf-8")


@app.command(cls=FileListsCommand)
def train(
    traces: Traces,
    text: Text = None,
    split_seed: SplitSeed = 0,
    everything: Annotated[bool, typer.Option("--all", help="Train on all groups; nothing is left to test on.")] = False,
    model: Annotated[str, typer.Option(help="A registered model.")] = "tabular",
    base: Base = None,
    bundle: Annotated[Path | None, typer.Option(help="Directory to write the model into.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write its origin and its scores.")] = None,
) -> None:
    """Train a model on some groups of programs, and write it with its scores on the others."""
    import json as writer
    from dataclasses import asdict

    from cluster.offline.commands._common import Outputs
    from predictor_service.evaluation import trained
    from predictor_service.examples import read_programs

    Outputs(json).check()
    stored = trained(model, read_programs(traces, text or ()), None if everything else split_seed, base)
    origin = stored.origin
    typer.echo(f"{model}: trained on {origin.programs} programs of {', '.join(origin.sources)}")
    for source, found in origin.metrics.items():
        typer.echo(f"{source}: " + ", ".join(_summary(question, of) for question, of in found.items() if of))
    if bundle is not None:
        stored.save(bundle)
        typer.echo(f"wrote {bundle}")
    if json is not None:
        command = shlex.join(["caesura", *sys.argv[1:]])
        json.write_text(writer.dumps({"command": command, "model": model, **asdict(origin)}) + "\n", encoding="utf-8")


def _summary(question: str, scores: dict[str, Any]) -> str:
    shown = {"mae": "MAE", "crps": "CRPS", "coverage": "in 90%", "tokens": "rank", "accuracy": "right"}
    return f"{question} " + " ".join(
        f"{word} {scores[key]:.4g}" for key, word in shown.items() if scores.get(key) is not None
    )


@app.command()
def export(
    store: Annotated[str, typer.Option(help="Redis of the cluster: redis://, rediss:// or unix://.")],
    out: Annotated[Path, typer.Option(help="Directory for programs.jsonl and text.jsonl.")],
    tenant: Annotated[str, typer.Option(help="Whose programs.")] = DEFAULT_TENANT,
    source: Annotated[str, typer.Option(help="What to call their source.")] = "cluster",
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Of each call to the store.")] = 5.0,
) -> None:
    """Write the server-side programs that a cluster has run as a trace, for train, evaluate, bench and simulate."""
    import asyncio

    out.mkdir(parents=True, exist_ok=True)
    try:
        count = asyncio.run(_export(store, out, tenant, source, timeout_s))
    except RunStoreUnavailable as error:
        raise ConfigError(f"--store {store}: {error}") from error
    typer.echo(f"wrote {count} runs into {out}")


async def _export(url: str, out: Path, tenant: str, source: str, timeout_s: float) -> int:
    import json
    import uuid

    from cluster.runs.export import exported
    from cluster.store.runs.store import RunStore

    store = RunStore(url, owner=f"export-{uuid.uuid4().hex}", timeout_s=timeout_s, lease_s=60.0, retention_s=60.0)
    count = 0
    try:
        with (out / "programs.jsonl").open("w") as programs, (out / "text.jsonl").open("w") as texts:
            async for trace in exported(store, tenant, source):
                programs.write(json.dumps(trace.program) + "\n")
                texts.writelines(json.dumps(text) + "\n" for text in trace.texts)
                count += 1
    finally:
        await store.close()
    return count
