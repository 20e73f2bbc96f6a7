"""`caesura bench`: replay agent programs against a running server, and compare policies."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.offline.commands._common import DEFAULT_URL, Outputs, Url
from cluster.offline.commands._shaping import (
    Calls,
    Categories,
    Limit,
    MaxContext,
    MaxTurns,
    NoCallsShare,
    RepeatTurns,
    ScaleLengths,
    ScaleTools,
    shaping_of,
)


def bench(
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Default: the first one that the server lists.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Programs to replay: .jsonl or .jsonl.gz.")] = None,
    workload: Annotated[str, typer.Option(help="Built-in programs, without --trace.")] = "infercept",
    missing_tool_s: Annotated[float | None, typer.Option(help="For tool durations that a trace lacks.")] = None,
    only_recorded: Annotated[bool, typer.Option(help="Leave out programs that lack a tool duration.")] = False,
    missing_tools_from: Annotated[
        Path | None, typer.Option(help="Draw tool durations that a trace lacks from this trace.")
    ] = None,
    policies: Annotated[str, typer.Option(help="a,b: compare these. Empty: leave the server as it is.")] = "",
    rate: Annotated[float, typer.Option(help="Programs per second.")] = 1.0,
    arrivals: Annotated[str, typer.Option(help="poisson, or gamma:CV (burstier above CV 1).")] = "poisson",
    duration_s: Annotated[float | None, typer.Option(help="Seconds of arrivals a block. Default: 60.")] = None,
    count: Annotated[int | None, typer.Option(help="Programs a block, in place of --duration-s.")] = None,
    warmup_s: Annotated[float, typer.Option(help="First seconds of a block that are not measured.")] = 0.0,
    blocks: Annotated[int, typer.Option(help="Times that each policy runs, in turns.")] = 1,
    scale_lengths: ScaleLengths = 1.0,
    scale_tools: ScaleTools = 1.0,
    max_context: MaxContext = None,
    max_turns: MaxTurns = None,
    limit: Limit = None,
    categories: Categories = "",
    calls: Calls = None,
    no_calls_share: NoCallsShare = 0.0,
    repeat_turns: RepeatTurns = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same programs, arrivals and token ids.")] = 0,
    slo_ttft: Annotated[float | None, typer.Option(help="Bound: seconds to the first token. Default: 1.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Bound: seconds per token after the first.")] = None,
    slo_e2e: Annotated[float | None, typer.Option(help="Bound: seconds to the end of a turn.")] = None,
    slo_norm: Annotated[float | None, typer.Option(help="Bound: seconds without tools per token.")] = None,
    turn_timeout_s: Annotated[float, typer.Option(help="A turn that takes longer has failed.")] = 600.0,
    drain_s: Annotated[float, typer.Option(help="Seconds after the last arrival to wait for the end.")] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Write one JSON line a policy.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write all programs and memory, for caesura report.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write SVG plots into this folder.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that was measured.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
) -> None:
    """Replay agent programs in an open loop: goodput, latencies and cache use, policy by policy."""
    from cluster.core.slo import Slo
    from cluster.offline.bench.session import run_in_terminal
    from cluster.offline.bench.settings import BenchSettings, listed

    bounds = (slo_ttft, slo_tpot, slo_e2e, slo_norm)
    settings = BenchSettings(
        url=url,
        model=model,
        trace=trace,
        workload=workload,
        missing_tool_s=missing_tool_s,
        only_recorded=only_recorded,
        missing_tools_from=missing_tools_from,
        shaping=shaping_of(
            scale_lengths,
            scale_tools,
            max_context,
            max_turns,
            limit,
            categories,
            calls,
            no_calls_share,
            repeat_turns,
        ),
        policies=listed(policies),
        rate_per_s=rate,
        arrivals=arrivals,
        duration_s=60.0 if duration_s is None and count is None else duration_s,
        count=count,
        warmup_s=warmup_s,
        blocks=blocks,
        seed=seed,
        slo=Slo(1.0) if bounds == (None,) * 4 else Slo(*bounds),
        turn_timeout_s=turn_timeout_s,
        drain_s=drain_s,
        command=shlex.join(["caesura", *sys.argv[1:]]),
        record=record is not None,
    )
    Outputs(json, record, plots).check()
    run_in_terminal(settings, json_lines=json, record=record, plots=plots, verbose=verbose, quiet=quiet)
