"""`caesura profile`: measure the configured engine's step times, and save them as a cost model."""

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.commands.config import Assignments, ConfigFile, read_config
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from cluster.config import CaesuraConfig
    from replicas.cost_fit import StepSample
    from replicas.profile import Profile


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the cost model, as JSON.")],
    config: ConfigFile = None,
    assignments: Assignments = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few points only: to see that it works.")] = False,
) -> None:
    """Measure the configured engine on this machine: step times, KV memory, host link; save a cost model."""
    from rich.console import Console

    settings = read_config(config, assignments)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    console = Console(highlight=False)
    with console.status("starting the engine") as status:

        def report(sample: "StepSample") -> None:
            status.update(f"{sample.tokens} tokens, {sample.sequences} sequences: {sample.seconds * 1e3:.2f} ms")

        result = asyncio.run(_measure(settings, quick, report))
    result.model.save(out, {"command": shlex.join(["caesura", *sys.argv[1:]]), **result.evidence()})
    console.print(_samples_table(result))
    console.print(_summary(result))
    console.print(f"wrote {out}")


async def _measure(settings: "CaesuraConfig", quick: bool, report: "Callable[[StepSample], None]") -> "Profile":
    if settings.replicas.accelerator == "cpu":
        from replicas.engine_arguments import CPU_ENVIRONMENT

        for name, value in CPU_ENVIRONMENT.items():  # vLLM and torch read it when they are imported
            os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from cluster.app import engine_kwargs, model_source
    from cluster.config import PolicyConfig
    from replicas.profile import QUICK, ProfilePlan, profile_engine

    # What a step costs is no policy's business: vLLM's own schedules each request as soon as it can. Nor is it the host
    # tier's: the link is measured by itself.
    replicas = settings.replicas.model_copy(update={"host_bytes": 0})
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


def _summary(result: "Profile") -> str:
    model, steps = result.model, result.steps
    lines = {
        "iteration": f"{model.overhead_s * 1e3:.3f} ms, {model.sequence_s * 1e6:.1f} us a sequence",
        "linear layers": f"{model.token_s * 1e6:.2f} us a token, at least {model.weights_s * 1e3:.3f} ms",
        "attention": f"{model.context_s * 1e9:.2f} ns a token read, {model.pair_s * 1e9:.3f} ns a pair",
        "saturation": f"{model.saturation_tokens} tokens",
        "request": f"{steps.request_s * 1e3:.3f} ms in and out, in no iteration",
        "KV memory": f"{model.kv_capacity_tokens:,} tokens of {model.kv_bytes_per_token:,.0f} bytes",
        "swap": f"{model.swap_s(1000) * 1e3:.3f} ms for 1,000 tokens, one way",
        "error of the fit": f"{steps.mean_error:.1%} in the mean, {steps.max_error:.1%} at most",
    }
    return "\n".join(f"  {name:<18}{value}" for name, value in lines.items())
