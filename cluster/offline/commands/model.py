"""`caesura profile` and `caesura model`: measure an engine as a cost model, and write the built-in model."""

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.core.errors import ConfigError
from cluster.offline.commands.config import Assignments, ConfigFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from cluster.config.schema import CaesuraConfig
    from replicas.cost_model import CostModel
    from replicas.profile import Profile, StepSample
    from replicas.silicon.fit import DeviceFit


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the cost model, as JSON.")],
    config: ConfigFile = None,
    assignments: Assignments = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few points only: to see that it works.")] = False,
    from_silicon: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="Fit public measurements of a preset's GPU; measure nothing here."),
    ] = None,
) -> None:
    """Measure the configured engine on this machine: step times, KV memory, host link; save a cost model."""
    from rich.console import Console

    from cluster.config.loader import read_config
    from cluster.offline.bench.terminal import print_table

    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise ConfigError(f"--out {out}: it is a folder; name a file in it")
    console = Console(highlight=False)
    command = shlex.join(["caesura", *sys.argv[1:]])
    if from_silicon is not None:
        if config is not None or assignments or quick:
            raise ConfigError(
                "--from-silicon: no engine is measured, so that neither --config, --set nor --quick applies"
            )
        from replicas.silicon.fit import silicon_model

        model, fit = silicon_model(from_silicon)
        model.save(out, {"command": command, **fit.content()})
        print_table(_errors_table(fit), console)
        console.print(_lines(_costs(model)))
        console.print(f"wrote {out}")
        return
    settings = read_config(config, assignments)
    with console.status("starting the engine") as status:

        def report(sample: "StepSample") -> None:
            status.update(f"{sample.tokens} tokens, {sample.sequences} sequences: {sample.seconds * 1e3:.2f} ms")

        result = asyncio.run(_measure(settings, quick, report))
    result.model.save(out, {"command": command, **result.evidence()})
    print_table(_samples_table(result), console)
    console.print(_summary(result))
    console.print(f"wrote {out}")


async def _measure(settings: "CaesuraConfig", quick: bool, report: "Callable[[StepSample], None]") -> "Profile":
    if settings.replicas.accelerator == "cpu":
        from replicas.settings import CPU_ENVIRONMENT

        for name, value in CPU_ENVIRONMENT.items():  # vLLM and torch read the variables when they are imported
            os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from cluster.app import engine_kwargs, model_source
    from cluster.config.schema import PolicyConfig
    from replicas.profile import QUICK, ProfilePlan, profile_engine

    # The policy must not influence the step times, so vLLM's own is used, which schedules each request at once. The
    # host tier is off, because its link is measured separately.
    replicas = settings.replicas.model_copy(update={"cpu_offload_bytes": 0})
    plain = settings.model_copy(update={"policy": PolicyConfig(name="vllm"), "replicas": replicas})
    arguments = {"model": model_source(plain), **engine_kwargs(plain)}
    return await profile_engine(f"{settings.model.id}, measured", arguments, QUICK if quick else ProfilePlan(), report)


def _samples_table(result: "Profile") -> "Table":
    from rich.table import Table

    table = Table(title="one iteration", caption="A prefill's time includes its request's way in and out.")
    for column in ("", "tokens", "sequences", "context", "measured, ms", "fitted, ms", "error"):
        table.add_column(column, justify="right" if column else "left")
    for sample in result.samples:
        fitted_s = result.predicted_s(sample)
        table.add_row(
            "prefill" if sample.requests else "decode",
            *(f"{number:,}" for number in (sample.tokens, sample.sequences, sample.context)),
            f"{sample.seconds * 1e3:.2f}",
            f"{fitted_s * 1e3:.2f}",
            f"{fitted_s / sample.seconds - 1:+.0%}",
        )
    return table


def _errors_table(fit: "DeviceFit") -> "Table":
    from rich.table import Table

    title = f"measured steps that were not fitted, {fit.name}"
    table = Table(title=title, caption="Predicted over measured: median, 10th and 90th percentile.")
    for column in ("source", "device", "model", "phase", "rows", "median", "p10", "p90"):
        numeric = column in ("rows", "median", "p10", "p90")
        table.add_column(column, justify="right" if numeric else "left")
    for group, errors in fit.errors().items():
        table.add_row(
            group.source,
            group.device,
            f"{group.model} x{group.ranks}",
            group.phase,
            str(errors.rows),
            *(f"{ratio:.2f}" for ratio in (errors.ratio, errors.p10, errors.p90)),
        )
    return table


def _summary(result: "Profile") -> str:
    steps = result.steps
    request = {"request": f"{steps.request_s * 1e3:.3f} ms in and out, in no iteration"}
    fit = {"error of the fit": f"{steps.mean_error:.1%} in the mean, {steps.max_error:.1%} at most"}
    return _lines({**_costs(result.model), **request, **fit})


def _costs(model: "CostModel") -> dict[str, str]:
    return {
        "iteration": f"{model.overhead_s * 1e3:.3f} ms, {model.sequence_s * 1e6:.1f} us a sequence",
        "linear layers": f"{model.token_s * 1e6:.2f} us a token, at least {model.weights_s * 1e3:.3f} ms",
        "attention": f"{model.context_s * 1e9:.2f} ns a token read, {model.pair_s * 1e9:.3f} ns a pair",
        "saturation": f"{model.saturation_tokens} tokens",
        "KV memory": f"{model.kv_capacity_tokens:,} tokens of {model.kv_bytes_per_token:,.0f} bytes",
        "swap": f"{model.swap_s(1000) * 1e3:.3f} ms for 1,000 tokens, one way",
    }


def _lines(lines: dict[str, str]) -> str:
    return "\n".join(f"  {name:<18}{value}" for name, value in lines.items())


app = typer.Typer(no_args_is_help=True, help="Models that come with Caesura.")


@app.callback()
def _group() -> None:
    """Models that come with Caesura."""


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; empty, or a tiny model.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Write the built-in random model: any command takes its path as `model.source`."""
    from replicas.tiny.model import write_tiny_model

    try:
        write_tiny_model(directory, seed)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}") from error
    typer.echo(f"wrote {directory}")
