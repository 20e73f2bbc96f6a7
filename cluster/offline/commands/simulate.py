"""`caesura simulate`: replay agent programs on real schedulers under virtual time, and compare policies."""

import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cluster.core.errors import ConfigError
from cluster.offline.commands._common import Outputs
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

if TYPE_CHECKING:
    from cluster.offline.bench.terminal import RunProgress
    from cluster.offline.bench.workload import Workload
    from cluster.offline.simulator.run import RunResult
    from cluster.offline.simulator.settings import SimulationSettings

T = TypeVar("T")


def simulate(
    policies: Annotated[
        str, typer.Option(help="a,b, or all (without peers). a+order=b+pause=c+budget=d: a, with axes of others.")
    ] = "all",
    rates: Annotated[
        str, typer.Option(help="Programs per second, or 0.9x: of the capacity; several with commas.")
    ] = "1",
    trace: Annotated[Path | None, typer.Option(help="Programs to replay: .jsonl or .jsonl.gz.")] = None,
    preset: Annotated[str, typer.Option(help="model/device, or a cost model's .json file.")] = "opt-13b/h800",
    minutes: Annotated[float | None, typer.Option(help="Measured minutes of arrivals. Default: 12.")] = None,
    count: Annotated[int | None, typer.Option(help="Programs of a run, in place of --minutes.")] = None,
    warmup: Annotated[float, typer.Option(help="Minutes of arrivals before, not measured.")] = 2.0,
    drain_s: Annotated[float, typer.Option(help="Seconds after the last arrival to wait for the end.")] = 300.0,
    seed: Annotated[str, typer.Option(help="One, or several with commas: each is a run.")] = "0",
    host_gib: Annotated[float, typer.Option(help="Host memory for KV of each replica, GiB; 0: no host tier.")] = 0.0,
    disk_gib: Annotated[
        float, typer.Option(help="Disk for KV of each replica below the host tier, GiB; 8 replicas share a volume.")
    ] = 0.0,
    prefix_cache: Annotated[
        bool, typer.Option(help="Off: released KV is forgotten, as by the papers' engines.")
    ] = True,
    slo_ttft: Annotated[
        str, typer.Option(help="Bound: seconds to a turn's first token. none: nothing has a bound.")
    ] = "1",
    policy_slo_ttft: Annotated[
        str | None, typer.Option(help="What policies get in place of --slo-ttft: seconds, or none.")
    ] = None,
    slo_per_turn_x: Annotated[
        float | None, typer.Option(help="Bound of a long prompt: x times its time alone, if this is more.")
    ] = None,
    slo_norm_x: Annotated[
        float,
        typer.Option(help="Bound: iteration times per token, without tools. It is measured; policies do not get it."),
    ] = 10.0,
    oracle: Annotated[bool | None, typer.Option(help="Give lengths and durations. Default: as the papers.")] = None,
    forecasts: Annotated[
        str | None,
        typer.Option(help="What forecasts what is not given: statistics, tabular, or a file of predictor forecast."),
    ] = None,
    reports: Annotated[
        str,
        typer.Option(help="What clients report of programs: nothing, ends, or ahead (tools and last turns)."),
    ] = "nothing",
    noise: Annotated[
        str, typer.Option(help="p: error N(0, p x value) of each given value; several with commas.")
    ] = "0",
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma:CV (burstier above CV 1) or recorded:PATH[,PATH].")
    ] = "poisson",
    burst: Annotated[str | None, typer.Option(help="RATE:START_S:LENGTH_S: another rate for a while.")] = None,
    replicas: Annotated[int, typer.Option(help="Replicas.")] = 1,
    router: Annotated[str, typer.Option(help="Places turns on replicas: a,b, or all.")] = "least_programs",
    max_ongoing: Annotated[
        int | None, typer.Option(help="Turns a replica takes at a time from others' routers.")
    ] = None,
    imbalanced: Annotated[float, typer.Option(help="Turns by which prefix_affinity lets replicas differ.")] = math.inf,
    autoscaler: Annotated[
        str, typer.Option(help="Decides how many of --replicas serve: static, caesura, queue_length (Ray's default).")
    ] = "static",
    min_replicas: Annotated[int, typer.Option(help="Replicas at least, with --autoscaler.")] = 1,
    start_s: Annotated[float, typer.Option(help="Seconds that a replica takes to start, with --autoscaler.")] = 120.0,
    restart_every_s: Annotated[
        float, typer.Option(help="Restart the replicas one after another, one in so many seconds; 0: none restarts.")
    ] = 0.0,
    target_ongoing: Annotated[float, typer.Option(help="Turns of a replica at which queue_length aims.")] = 2.0,
    prefill_replicas: Annotated[
        int, typer.Option(help="Number of the replicas that only compute prompts, whose KV then moves; 0: none.")
    ] = 0,
    prefill_above: Annotated[
        int, typer.Option(help="A prompt goes to one of them if its own replica lacks more tokens of it.")
    ] = 2048,
    network_gbit_s: Annotated[float, typer.Option(help="Gbit/s at which each of them sends KV.")] = 200.0,
    under_way: Annotated[int | None, typer.Option(help="Closed loop of so many programs, whatever the rate.")] = None,
    missing_tool_s: Annotated[float | None, typer.Option(help="For tool durations that a trace lacks.")] = None,
    only_recorded: Annotated[bool, typer.Option(help="Leave out programs that lack a tool duration.")] = False,
    missing_tools_from: Annotated[
        Path | None, typer.Option(help="Draw tool durations that a trace lacks from this trace.")
    ] = None,
    scale_lengths: ScaleLengths = 1.0,
    scale_tools: ScaleTools = 1.0,
    max_context: MaxContext = None,
    max_turns: MaxTurns = None,
    limit: Limit = None,
    categories: Categories = "",
    calls: Calls = None,
    no_calls_share: NoCallsShare = 0.0,
    repeat_turns: RepeatTurns = 1,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step at most, if not vLLM's default on the preset's GPU.")
    ] = None,
    max_seqs: Annotated[
        int | None, typer.Option(help="Turns that run at a time at most, if not vLLM's default on the preset's GPU.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="policy.parameter=value; repeatable.")] = None,
    front: Annotated[list[str] | None, typer.Option(help="parameter=value of the router caesura; repeatable.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on a core.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write one JSON line a run.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write all programs and memory, for caesura report.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write SVG plots into this folder.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that was measured.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
) -> None:
    """Replay agent programs on real schedulers under virtual time: goodput, latencies and cache use, side by side."""
    from cluster.offline.bench.terminal import RunProgress

    # Both are read once, when vLLM is imported: here, and in the processes that --jobs starts.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with RunProgress(quiet=quiet) as progress:
        from cluster.config.loader import parse_assignment
        from cluster.offline.simulator.disaggregated import Disaggregation
        from cluster.offline.simulator.elastic import Scaling
        from cluster.offline.simulator.routers import router_names
        from cluster.offline.simulator.run import rates_of
        from cluster.offline.simulator.settings import SimulationSettings, policy_names

        if count is not None and minutes is not None:
            raise ConfigError("--count, --minutes: give one of them")
        settings = SimulationSettings(
            policies=policy_names(policies),
            rates_per_s=(1.0,),
            preset=preset,
            trace=trace,
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
            minutes=12.0 if minutes is None else minutes,
            count=count,
            warmup_minutes=warmup,
            drain_s=drain_s,
            seeds=_list("--seed", seed, int),
            host_gib=host_gib,
            disk_gib=disk_gib,
            prefix_cache=prefix_cache,
            slo_ttft=slo_ttft,
            policy_slo_ttft=policy_slo_ttft,
            slo_norm_x=slo_norm_x,
            slo_per_turn_x=slo_per_turn_x,
            reports=reports,
            noises=_list("--noise", noise, float),
            oracle=oracle,
            forecasts=forecasts,
            arrivals=arrivals,
            burst=burst,
            replicas=replicas,
            routers=router_names(router),
            max_ongoing=max_ongoing,
            imbalanced_threshold=imbalanced,
            scaling=Scaling(autoscaler, min_replicas, start_s, target_ongoing),
            restart_every_s=restart_every_s,
            disaggregation=Disaggregation(prefill_replicas, prefill_above, network_gbit_s),
            under_way=under_way,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_seqs,
            parameters=_parameters(set_ or []),
            front=dict(parse_assignment(text) for text in front or []),
            command=shlex.join(["caesura", *sys.argv[1:]]),
            record=record is not None,
        )
        settings = replace(settings, rates_per_s=rates_of(settings, rates))
        results, workload = _run(settings, jobs, Outputs(json, record, plots), progress)
    _show(results, workload, settings, plots, quiet=quiet, verbose=verbose)


def _run(
    settings: "SimulationSettings", jobs: int, outputs: Outputs, progress: "RunProgress"
) -> "tuple[list[RunResult], Workload]":
    """Simulate all runs, and write each result at once. Return the results and the workload of the last seed."""
    from cluster.offline.bench.record import write
    from cluster.offline.simulator.report import json_line, record_lines
    from cluster.offline.simulator.run import load_workload, runs_of, simulate_all

    outputs.check()
    for seed in settings.seeds:
        workload = load_workload(settings, seed)
    results: list[RunResult] = []
    progress.begin("runs", len(runs_of(settings)))
    for result in simulate_all(settings, jobs):
        results.append(result)
        progress.advance(f"{result.run.policy} at {result.run.rate_per_s:g}/s")
        if outputs.json_lines is not None:
            with outputs.json_lines.open("w" if len(results) == 1 else "a") as file:
                file.write(json_line(result, settings))
        if outputs.record is not None:
            write(record_lines(len(results), result, settings), outputs.record, more=len(results) > 1)
            results[-1] = replace(result, recorded=None)
    return results, workload


def _show(
    results: "list[RunResult]",
    workload: "Workload",
    settings: "SimulationSettings",
    plots: Path | None,
    *,
    quiet: bool,
    verbose: bool,
) -> None:
    from rich.console import Console

    from cluster.offline.report.plots import write_plots
    from cluster.offline.report.reading import Run, Runs
    from cluster.offline.simulator.report import print_report, run_line

    console = Console(quiet=quiet)
    print_report(results, settings, console, verbose=verbose)
    console.print(f"Programs in the pool: {len(workload.programs)}; dropped as too long: {workload.dropped}.")
    for note in workload.notes:
        console.print(f"Note: {note}.", markup=False, highlight=False, soft_wrap=True)
    if plots is not None:
        runs = Runs([Run(run_line(number, result, settings), "") for number, result in enumerate(results)])
        for path in write_plots(runs, plots):
            console.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _list(flag: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(read(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _parameters(assignments: list[str]) -> dict[str, dict[str, Any]]:
    from cluster.config.loader import parse_assignment

    parameters: dict[str, dict[str, Any]] = {}
    for text in assignments:
        key, value = parse_assignment(text)
        policy, dot, name = key.partition(".")
        if not dot or not name:
            raise ConfigError(f"--set {key}: must be policy.parameter=value")
        parameters.setdefault(policy, {})[name] = value
    return parameters
