"""`caesura predictor`: the models that predict lengths, tools and durations."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.core.errors import ConfigError, RunStoreUnavailable
from cluster.core.program import DEFAULT_TENANT
from cluster.offline.commands._common import FileListsCommand, whole_files, writing

app = typer.Typer(no_args_is_help=True, help="Models that predict turns and pauses.")

Traces = Annotated[list[Path], typer.Option(metavar="FILE...", help="Programs: .jsonl or .jsonl.gz.")]
Text = Annotated[list[Path] | None, typer.Option(metavar="FILE...", help="Texts of their turns.")]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Checkpoint for encoder, lamps (such as OPT-125M) or augserve (such as BERT): a directory with config, "
        "safetensors, tokenizer.",
    ),
]
TestShare = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=0.99, help="Share of the groups to test on. Default: 0.3; to train lamps: 0.2, as its paper."
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
    test_share: TestShare = None,
    models: Annotated[
        str, typer.Option(help="a,b, or all: statistics and tabular; encoder, if there is a --base.")
    ] = "all",
    bundle: Annotated[
        Path | None, typer.Option(help="A model that was trained before; it is not fitted again.")
    ] = None,
    base: Base = None,
    json: Annotated[Path | None, typer.Option(help="Write one JSON line a model and source.")] = None,
) -> None:
    """Fit models to some groups of programs, and score their forecasts of the others, beside baselines.

    Scores are of tokens generated, seconds and tokens of tool calls, the next tool, and what a program has left. The
    papers' measures are in a table of their own. With a bundle, the share to test on is that of its training.
    """
    from cluster.core.registry import BASED_PREDICTORS, PREDICTORS
    from cluster.offline.commands._common import Outputs
    from predictor_service.bundle import load_model
    from predictor_service.evaluation import check_unseen, evaluated
    from predictor_service.examples import TEST_SHARE, read_programs
    from predictor_service.scores import PAPERS, json_lines, tables

    Outputs(json).check()
    ready: dict[str, Any] = {}
    if bundle is not None:
        stored = load_model(bundle)
        check_unseen(stored, split_seed, test_share)
        test_share = test_share or stored.origin.test_share
        ready[stored.name] = stored.model
    programs = read_programs(traces, text or ())
    unbased = tuple(name for name in PREDICTORS if name not in BASED_PREDICTORS)
    everything = unbased if base is None else (*unbased, "encoder")
    names = everything if models == "all" else tuple(models.split(","))
    names += tuple(name for name in ready if name not in names)
    share = test_share or TEST_SHARE

    def finished(name: str) -> None:
        typer.echo(f"{name}: done", err=True)

    found = evaluated(programs, split_seed, names, ready, base, finished, share)
    typer.echo(f"{tables(found)}\n\n{PAPERS}")
    if json is not None:
        command = shlex.join(["caesura", *sys.argv[1:]])
        about = {"command": command, "split_seed": split_seed, "test_share": share}
        json.write_text(json_lines(found, about), encoding="utf-8")


@app.command(cls=FileListsCommand)
def train(
    traces: Traces,
    text: Text = None,
    split_seed: SplitSeed = 0,
    test_share: TestShare = None,
    everything: Annotated[bool, typer.Option("--all", help="Train on all groups; nothing is left to test on.")] = False,
    model: Annotated[
        str, typer.Option(help="statistics, tabular, encoder, or a paper's: lamps (also of MARS), augserve.")
    ] = "tabular",
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
    if bundle is not None:
        with writing("--bundle"), whole_files(bundle / ".probe"):  # training takes long
            pass
        (bundle / ".probe").unlink()
    stored = trained(model, read_programs(traces, text or ()), None if everything else split_seed, base, test_share)
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
    shown = {
        "acc_5": "Acc-5",
        "acc_15": "Acc-15",
        "mae": "MAE",
        "crps": "CRPS",
        "coverage": "in 90%",
        "tokens": "rank",
        "accuracy": "right",
        "mse_s2": "MSE of seconds",
    }
    return f"{question} " + " ".join(
        f"{word} {scores[key]:.4g}" for key, word in shown.items() if scores.get(key) is not None
    )


@app.command(cls=FileListsCommand)
def forecast(
    traces: Traces,
    bundle: Annotated[Path, typer.Option(help="A trained model.")],
    out: Annotated[Path, typer.Option(help="File to write: JSON lines.")],
    text: Text = None,
) -> None:
    """Write a trained model's forecasts of the programs that it has not seen, for simulate --forecasts FILE.

    What the model does not forecast, statistics of the other programs do.
    """
    from predictor_service.bundle import load_model
    from predictor_service.examples import read_programs
    from predictor_service.forecast_files import held_out_forecasts, write_forecasts

    with writing("--out"):
        out.touch()
    forecasts = held_out_forecasts(load_model(bundle), read_programs(traces, text or ()))
    write_forecasts(out, forecasts)
    typer.echo(f"wrote forecasts of {len(forecasts)} programs into {out}")


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
        with writing("--out"), whole_files(out / "programs.jsonl", out / "text.jsonl") as (programs, texts):
            async for trace in exported(store, tenant, source):
                programs.write(json.dumps(trace.program) + "\n")
                texts.writelines(json.dumps(text) + "\n" for text in trace.texts)
                count += 1
    finally:
        await store.close()
    return count
