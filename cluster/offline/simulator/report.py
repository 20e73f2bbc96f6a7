"""Reports simulated runs: JSON lines, and for each rate a table with the policies side by side."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.core.registry import PEERS
from cluster.core.slo import Slo
from cluster.offline.bench.metrics import COMPLETION, ROUTING, mean, shown
from cluster.offline.bench.record import Line, RunLine, lines_of, versions
from cluster.offline.bench.results import measures
from cluster.offline.bench.terminal import print_comparison, print_table
from cluster.offline.simulator.load import RECOVERED, Recovery
from cluster.offline.simulator.run import RunResult
from cluster.offline.simulator.settings import (
    BASELINES,
    BLOCK_SIZE,
    SECONDS_PER_MINUTE,
    WITHOUT_HOST_TIER,
    SimulationSettings,
)

BOUND = "fluid bound"


def wall_s_per_minute(result: RunResult) -> float:
    """Return the real seconds per minute of arrivals at one replica. The time after the last arrival is included."""
    return result.wall_s / (result.arrivals_s / SECONDS_PER_MINUTE) / result.replicas


def as_json(result: RunResult, settings: SimulationSettings) -> dict[str, Any]:
    """Return the JSON line of a run: the keys of `caesura bench`, and ``simulation`` with what only a simulator knows.

    Times are in seconds unless the key has another unit; ``goodput_*`` and ``*_per_s`` are per second.
    ``wasted_gib_s`` integrates two amounts over the measured window, which ``wasted_by_cause_gib_s`` has separately: KV
    on hold, and the KV of all running turns times the share of recomputed tokens in the step. ``jain``: see
    `cluster.offline.simulator.fairness`. ``recomputing_share`` is the share of the steps' time in which tokens were
    computed again. ``schedule_ms`` and ``wall_s_per_minute`` are in real time, all other
    values in virtual time. ``stored_tokens`` and ``loaded_tokens`` count the tokens whose KV was offloaded to the host
    and loaded back, over the whole run. ``share_of_capacity`` is the rate divided by the fluid bound's capacity.
    ``routing``: see `cluster.offline.simulator.routed.RoutingSummary`.
    """
    run = result.run
    return {
        "policy": run.policy,
        "router": run.router,
        "preset": settings.preset,
        "rate": run.rate_per_s,
        "seed": run.seed,
        "host_gib": settings.host_gib,
        "disk_gib": settings.disk_gib,
        "restart_every_s": settings.restart_every_s,
        "disaggregation": asdict(settings.disaggregation) if settings.disaggregation.replicas else None,
        **measures(result.summary),
        "jain": result.jain,
        "wasted_gib_s": result.wasted_gib_s.total,
        "wasted_by_cause_gib_s": asdict(result.wasted_gib_s),
        "schedule_ms": {"mean": result.schedule_ms.mean, "p99": result.schedule_ms.p99},
        "wall_s_per_minute": wall_s_per_minute(result),
        "command": settings.command,
        "simulation": {
            "oracle": settings.sees_the_future(run.policy),
            "noise": run.noise,
            "count": settings.count,
            "forecasts": settings.forecasts,
            "arrivals": settings.arrivals,
            "replicas": result.replicas,
            "autoscaler": asdict(settings.scaling),
            "replica_hours": result.replica_hours,
            "most_replicas": result.most_replicas,
            "parameters": dict(settings.parameters.get(run.policy, {})),
            "slo": asdict(settings.goodput_slo()),
            "jct_all_s": result.summary.distributions["completion_all_s"].mean,
            "jct_wall_all_s": result.summary.distributions["completion_wall_all_s"].mean,
            "tokens_per_s": result.summary.tokens_per_s,
            "under_way": settings.under_way,
            "max_ongoing": settings.max_ongoing,
            "front": dict(settings.front),
            "routing": asdict(result.routing),
            "capacity_per_s": result.capacity_per_s,
            "share_of_capacity": round(run.rate_per_s / result.capacity_per_s, 3),
            "bound_per_s": result.bound_per_s,
            "preemptions": result.preemptions,
            "recomputing_share": result.recomputing_share,
            "tier": settings.tier(run.policy),
            "stored_tokens": result.stored_tokens,
            "loaded_tokens": result.loaded_tokens,
            "steps": result.steps,
            "simulated_s": result.simulated_s,
            "recovery": None if result.recovery is None else _recovery_json(result.recovery),
        },
    }


def json_line(result: RunResult, settings: SimulationSettings) -> str:
    """Return the text of :func:`as_json`, with a newline."""
    return json.dumps(as_json(result, settings)) + "\n"


def run_line(number: int, result: RunResult, settings: SimulationSettings) -> RunLine:
    """Make the first line of a run's record. ``number`` is unique in the file."""
    run = result.run
    return RunLine(
        run=number,
        policy=run.policy,
        router=run.router if result.replicas > 1 else "",
        preset=settings.preset,
        rate=run.rate_per_s,
        seed=run.seed,
        window_s=(settings.warmup_s, result.arrivals_s),
        slo=asdict(settings.goodput_slo()),
        summary=measures(result.summary)
        | {"wasted_gib_s": result.wasted_gib_s.total, "bound_per_s": result.bound_per_s},
        versions=versions(),
        command=settings.command,
        capacity_tokens=settings.blocks * BLOCK_SIZE * result.replicas,
    )


def record_lines(number: int, result: RunResult, settings: SimulationSettings) -> Iterator[Line]:
    """Make all lines of the record of a run that was recorded."""
    assert result.recorded is not None, "the run was not recorded"
    return lines_of(run_line(number, result, settings), result.recorded, settings.goodput_slo())


def print_report(
    results: Sequence[RunResult], settings: SimulationSettings, console: Console, *, verbose: bool = False
) -> None:
    """Print a table for each rate and noise, a table of the burst if there was one, and footnotes."""
    leave_out = ROUTING if settings.replicas == 1 else ""
    for rate, noise in product(settings.rates_per_s, settings.noises):
        of_rate = [result for result in results if (result.run.rate_per_s, result.run.noise) == (rate, noise)]
        columns = {
            label: [as_json(r, settings) for r in of_rate if (r.run.policy, r.run.router) == column]
            for column, label in _columns(settings).items()
        }
        print_comparison(_title(of_rate, settings, rate), columns, console, verbose=verbose, leave_out=leave_out)
    if settings.burst is not None:
        print_table(_recovery_table(results, settings), console)
    for line in _footnotes(results, settings, verbose=verbose):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _title(of_rate: Sequence[RunResult], settings: SimulationSettings, rate: float) -> str:
    of_seeds = f", mean of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else ""
    trace = settings.trace.name if settings.trace else "built-in workload"
    bound = f"{BOUND} {shown(mean([result.bound_per_s for result in of_rate]))} good programs/s"
    errors = f", errors of N(0, {of_rate[0].run.noise:g} x value)" if len(settings.noises) > 1 else ""
    return f"{_load(settings, rate)}{errors}: {trace} on {settings.preset}{_replicas(settings)}{of_seeds}; {bound}"


def _load(settings: SimulationSettings, rate: float) -> str:
    if settings.under_way is not None:
        return f"{settings.under_way} programs under way"
    if settings.count is not None:
        return f"{settings.count} programs, {rate:g} programs/s, {settings.arrivals}"
    return f"{rate:g} programs/s, {settings.arrivals}"


def _replicas(settings: SimulationSettings) -> str:
    return f" x {settings.replicas}" if settings.replicas > 1 else ""


def _columns(settings: SimulationSettings) -> dict[tuple[str, str], str]:
    """Return the label of each pair of policy and router. It names the router only if there are several."""
    several = len(settings.routers) > 1
    return {
        (policy, router): f"{policy}\n{router}" if several else policy
        for policy in settings.policies
        for router in settings.routers
    }


def _recovery_table(results: Sequence[RunResult], settings: SimulationSettings) -> Table:
    """Make a table with a row for each run and a column for each window around the burst."""
    recoveries = [(result, result.recovery) for result in results if result.recovery is not None]
    table = Table(title="SLO attainment in windows of 30 s, by intended arrival (seconds from the start)")
    table.box, table.pad_edge, table.title_justify = box.SIMPLE_HEAD, False, "left"
    table.add_column("run")
    for window in recoveries[0][1].windows if recoveries else ():
        table.add_column(f"{window.start_s:g}", justify="right")
    table.add_column(f"{RECOVERED:.0%} again", justify="right")
    for result, recovery in recoveries:
        label = _columns(settings)[result.run.policy, result.run.router].replace("\n", ", ")
        name = f"{label}, {result.run.rate_per_s:g}/s, seed {result.run.seed}"
        table.add_row(name, *(shown(window.attainment) for window in recovery.windows), _after(recovery))
    return table


def _after(recovery: Recovery) -> str:
    return "never" if recovery.recovered_s is None else f"after {recovery.recovered_s:g} s"


def _bounds(settings: SimulationSettings) -> list[str]:
    slo, policies = settings.goodput_slo(), settings.slo().bounds
    lines = []
    if slo.normalized_latency_s is not None:
        lines.append(
            f"Good: TTFT of each turn <= {slo.ttft_s:g} s, and the program's time without tools / its tokens <= "
            f"{slo.normalized_latency_s:.4g} s = {settings.slo_norm_x:g} x "
            f"{settings.cost_model().decode_step_s():.4g} s, a step that decodes one sequence without a context. "
            "Good by first turn: only its TTFT is bounded (AugServe)."
        )
    if slo.slowdown is not None:
        lines.append(
            f"A turn's TTFT may be {slo.slowdown:g} x the time that its new tokens take alone, if this is more."
        )
    if slo == Slo():
        lines.append("Nothing has a bound.")
    if policies != slo:
        told = "no bound" if policies == Slo() else f"a bound on the TTFT of {shown(policies.ttft_s)} s"
        lines.append(f"Policies and routers get {told}.")
    return lines


def _footnotes(results: Sequence[RunResult], settings: SimulationSettings, *, verbose: bool) -> list[str]:
    informed = [policy for policy in settings.policies if settings.sees_the_future(policy)]
    learn = [policy for policy in settings.policies if policy not in (*informed, *BASELINES, *PEERS)]
    errors = " or ".join(f"{noise:g}" for noise in settings.noises)
    noise = f" with errors of N(0, {errors} x value)" if any(settings.noises) else ""
    lines = [] if verbose else ["All that was measured: --verbose, or the lines of --json."]
    lines += [
        COMPLETION,
        *_bounds(settings),
    ]
    if any(policy in BASELINES for policy in settings.policies):
        which = ", ".join(f"{name} ({settings.tier(name)})" for name in settings.policies if name in BASELINES)
        lines.append(f"vLLM's own scheduler class, untouched: {which}.")
    if peers := [f"{name} ({settings.tier(name)})" for name in settings.policies if name in PEERS]:
        lines.append(f"Peers' schedulers, driven as docs/policies.md describes: {', '.join(peers)}.")
    if settings.host_gib:
        lines.append(
            "Host tier, of each replica: vLLM's offloading connector, by its own rules (LRU) for the baseline and for "
            f"peers, by Caesura's for the others, none for {', '.join(sorted(WITHOUT_HOST_TIER))}. What a turn "
            "generates is kept there, too, which is not vLLM's default."
        )
    if informed:
        lines.append(f"Given true lengths and durations{noise}: {', '.join(informed)}.")
    if learn:
        by = f", and forecasts of {settings.forecasts}, fitted on other groups" if settings.forecasts else ""
        lines.append(f"Know the tool's name and what they have learnt in the run{by}: {', '.join(learn)}.")
    if ended := [name for name in settings.policies if settings.reports_of(name) != settings.reports]:
        lines.append(f"The end of each program is reported, as their papers assume: {', '.join(ended)}.")
    if not settings.scaling.is_static:
        hours = ", ".join(
            f"{result.run.policy} {shown(result.replica_hours)} (at most {result.most_replicas})" for result in results
        )
        lines.append(
            f"Replicas by load ({settings.scaling.policy}, {settings.scaling.start_s:g} s to start), replica-hours of "
            f"the measured window: {hours}."
        )
    capacity = mean([result.capacity_per_s for result in results])
    restore = "restored from the host for nothing" if settings.host_gib else "held in memory or computed again"
    lines.append(
        f"Fluid bound: capacity {shown(capacity)} programs/s if steps are as full as memory allows and contexts are "
        f"{restore}, as is best; beyond it, the programs of least work are served."
    )
    if settings.command:
        lines.append(f"Command: {settings.command}")
    return lines


def _recovery_json(recovery: Recovery) -> dict[str, Any]:
    return {
        "recovered_s": recovery.recovered_s,
        "windows": [{**asdict(window), "attainment": window.attainment} for window in recovery.windows],
    }
