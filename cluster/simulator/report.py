"""Shows simulated runs: JSON lines, a table a rate with the policies side by side, and a plot of goodput over rate."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from cluster.bench.record import Line, RunLine, lines_of, versions
from cluster.bench.summary import measures
from cluster.simulator.recovery import RECOVERED, Recovery
from cluster.simulator.run import RunResult
from cluster.simulator.settings import BASELINES, BLOCK_SIZE, SECONDS_PER_MINUTE, STOCK_NO_CACHE, SimulationSettings

UNKNOWN = "-"
BOUND = "fluid bound"

ROWS: tuple[tuple[str, Callable[[RunResult], float | None]], ...] = (
    ("goodput, programs/s", lambda r: r.summary.goodput.programs_per_s),
    ("  of the fluid bound", lambda r: r.summary.goodput.programs_per_s / r.bound_per_s),
    ("SLO attainment", lambda r: r.summary.goodput.attainment),
    ("programs offered", lambda r: r.summary.goodput.offered_programs),
    ("  completed", lambda r: r.summary.goodput.completed_programs),
    ("TTFT, s, mean", lambda r: r.summary.distributions["ttft_s"].mean),
    ("  p99", lambda r: r.summary.distributions["ttft_s"].p99),
    ("JCT without tools, s, mean", lambda r: r.summary.distributions["jct_s"].mean),
    ("  unfinished included", lambda r: r.jct_all_s),
    ("s/token, mean", lambda r: r.summary.distributions["norm_latency_s"].mean),
    ("scheduling bubble, s", lambda r: r.summary.distributions["bubble_s"].mean),
    ("recomputed tokens/program", lambda r: r.summary.distributions["recomputed_tokens"].mean),
    ("reused tokens/program", lambda r: r.summary.distributions["reused_tokens"].mean),
    ("  of them from the host", lambda r: r.summary.distributions["fetched_tokens"].mean),
    ("prompt tokens cached, %", lambda r: _percent(r.routing.hit_rate)),
    ("  of an infinite cache's", lambda r: _percent(r.routing.hit_of_infinite)),
    ("wasted KV, GiB s", lambda r: r.wasted_gib_s),
    ("preemptions", lambda r: r.preemptions),
    ("schedule(), ms, mean", lambda r: r.schedule_ms.mean),
    ("  p99", lambda r: r.schedule_ms.p99),
    ("real s per minute", lambda r: wall_s_per_minute(r)),
)

ROUTING_ROWS: tuple[tuple[str, Callable[[RunResult], float | None]], ...] = (
    ("JCT with tools, s, all", lambda r: r.jct_wall_all_s),
    ("turns on a replica, largest/mean", lambda r: r.routing.load_max_over_mean),
    ("computing seconds, largest/mean", lambda r: r.routing.busy_max_over_mean),
    ("refused programs", lambda r: r.routing.refused),
    ("moves", lambda r: r.routing.moves),
    ("split programs", lambda r: r.routing.split),
    ("turns that waited at the router", lambda r: r.routing.waited),
    ("  how long, s, mean", lambda r: r.routing.wait_s),
    ("  longest", lambda r: r.routing.longest_wait_s),
)
"""Where there are several replicas."""


def wall_s_per_minute(result: RunResult) -> float:
    """Real seconds for a minute of arrivals at one replica; what came after the last arrival is counted in."""
    return result.wall_s / (result.arrivals_s / SECONDS_PER_MINUTE) / result.replicas


def as_json(result: RunResult, settings: SimulationSettings) -> dict[str, Any]:
    """One JSON line. The keys of `caesura bench`, and ``simulation`` for what only a simulator has.

    Times are seconds unless the key says otherwise, ``goodput_*`` and ``*_per_s`` per second. ``wasted_gib_s``: KV on
    hold plus, while a step recomputes, the KV of its batch in the proportion of recomputed to scheduled tokens,
    integrated over the measured window. ``schedule_ms`` and ``wall_s_per_minute`` are real time, all else is virtual.
    ``stored_tokens`` and ``loaded_tokens``: KV that went to the host tier and came back, over the whole run.
    ``routing``: see `cluster.simulator.routed.RoutingSummary`.
    """
    run = result.run
    return {
        "policy": run.policy,
        "router": run.router,
        "preset": settings.preset,
        "rate": run.rate_per_s,
        "seed": run.seed,
        "host_gib": settings.host_gib,
        **measures(result.summary),
        "wasted_gib_s": result.wasted_gib_s,
        "schedule_ms": {"mean": result.schedule_ms.mean, "p99": result.schedule_ms.p99},
        "wall_s_per_minute": wall_s_per_minute(result),
        "command": settings.command,
        "simulation": {
            "oracle": settings.tells_the_future(run.policy),
            "noise": settings.noise,
            "forecasts": settings.forecasts,
            "arrivals": settings.arrivals,
            "replicas": result.replicas,
            "parameters": dict(settings.parameters.get(run.policy, {})),
            "slo": asdict(settings.goodput_slo()),
            "jct_all_s": result.jct_all_s,
            "jct_wall_all_s": result.jct_wall_all_s,
            "tokens_per_s": result.tokens_per_s,
            "under_way": settings.under_way,
            "max_ongoing": settings.max_ongoing,
            "front": dict(settings.front),
            "routing": asdict(result.routing),
            "capacity_per_s": result.capacity_per_s,
            "bound_per_s": result.bound_per_s,
            "preemptions": result.preemptions,
            "tier": settings.tier(run.policy),
            "stored_tokens": result.stored_tokens,
            "loaded_tokens": result.loaded_tokens,
            "steps": result.steps,
            "simulated_s": result.simulated_s,
            "recovery": None if result.recovery is None else _recovery_json(result.recovery),
        },
    }


def json_line(result: RunResult, settings: SimulationSettings) -> str:
    """As :func:`as_json`, with its newline."""
    return json.dumps(as_json(result, settings)) + "\n"


def record_lines(number: int, result: RunResult, settings: SimulationSettings) -> Iterator[Line]:
    """Of a run that was recorded; ``number`` is its own in the file."""
    assert result.recorded is not None, "the run was not recorded"
    run, slo = result.run, settings.goodput_slo()
    line = RunLine(
        run=number,
        policy=run.policy,
        router=run.router if result.replicas > 1 else "",
        preset=settings.preset,
        rate=run.rate_per_s,
        seed=run.seed,
        window_s=(settings.warmup_s, settings.arrivals_s),
        slo=asdict(slo),
        summary=measures(result.summary) | {"wasted_gib_s": result.wasted_gib_s, "bound_per_s": result.bound_per_s},
        versions=versions(),
        command=settings.command,
        capacity_tokens=settings.blocks * BLOCK_SIZE * result.replicas,
    )
    return lines_of(line, result.recorded, slo)


def print_report(results: Sequence[RunResult], settings: SimulationSettings, console: Console) -> None:
    """A table a rate, the burst if there was one, and what a reader has to know."""
    for rate in settings.rates_per_s:
        console.print(_table(results, settings, rate))
    if settings.burst is not None:
        console.print(_recovery_table(results, settings))
    for line in _footnotes(results, settings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(results: Sequence[RunResult], settings: SimulationSettings, rate: float) -> Table:
    of_rate = [result for result in results if result.run.rate_per_s == rate]
    of_seeds = f", mean of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else ""
    trace = settings.trace.name if settings.trace else "built-in workload"
    bound = _number(_mean([result.bound_per_s for result in of_rate]))
    table = Table(
        title=f"{_load(settings, rate)}: {trace} on {settings.preset}{_replicas(settings)}{of_seeds}",
        caption=f"{BOUND}: {bound} programs/s",
    )
    table.add_column("")
    columns = _columns(settings)
    for label in columns.values():
        table.add_column(label, justify="right")
    for label, row in (*ROWS, *(ROUTING_ROWS if settings.replicas > 1 else ())):
        cells = (_mean([row(r) for r in of_rate if (r.run.policy, r.run.router) == column]) for column in columns)
        table.add_row(label, *map(_number, cells))
    return table


def _load(settings: SimulationSettings, rate: float) -> str:
    if settings.under_way is not None:
        return f"{settings.under_way} programs under way"
    return f"{rate:g} programs/s, {settings.arrivals}"


def _replicas(settings: SimulationSettings) -> str:
    return f" x {settings.replicas}" if settings.replicas > 1 else ""


def _columns(settings: SimulationSettings) -> dict[tuple[str, str], str]:
    """What is compared, policy and router, and what it is called: by its router only where there are several."""
    several = len(settings.routers) > 1
    return {
        (policy, router): f"{policy}\n{router}" if several else policy
        for policy in settings.policies
        for router in settings.routers
    }


def _recovery_table(results: Sequence[RunResult], settings: SimulationSettings) -> Table:
    table = Table(title="attainment in windows of 30 s, by intended arrival")
    table.add_column("from s", justify="right")
    for result in results:
        label = _columns(settings)[result.run.policy, result.run.router]
        table.add_column(f"{label}\n{result.run.rate_per_s:g}/s #{result.run.seed}", justify="right")
    recoveries = [result.recovery for result in results if result.recovery is not None]
    for windows in zip(*(recovery.windows for recovery in recoveries), strict=True):
        table.add_row(f"{windows[0].start_s:g}", *(_number(window.attainment) for window in windows))
    table.add_section()
    table.add_row(f"{RECOVERED:.0%} again", *(_after(recovery) for recovery in recoveries))
    return table


def _after(recovery: Recovery) -> str:
    return "never" if recovery.recovered_s is None else f"after {recovery.recovered_s:g} s"


def _footnotes(results: Sequence[RunResult], settings: SimulationSettings) -> list[str]:
    slo = settings.goodput_slo()
    told = [policy for policy in settings.policies if settings.tells_the_future(policy)]
    learn = [policy for policy in settings.policies if policy not in (*told, *BASELINES)]
    noise = f" with errors of N(0, {settings.noise:g} x value)" if settings.noise else ""
    lines = [
        f"Good: TTFT of each turn <= {slo.ttft_s:g} s, and the program's time without tools / its tokens <= "
        f"{slo.normalized_latency_s:.4g} s = {settings.slo_norm_x:g} x {settings.cost_model().decode_step_s():.4g} s, "
        "a step that decodes one sequence without a context.",
    ]
    if any(policy in BASELINES for policy in settings.policies):
        which = ", ".join(f"{name} ({settings.tier(name)})" for name in settings.policies if name in BASELINES)
        lines.append(f"vLLM's own scheduler class, untouched: {which}.")
    if settings.host_gib:
        lines.append(
            "Host tier, of each replica: vLLM's offloading connector, by its own rules (LRU) for the baseline, by "
            f"Caesura's for the others, none for {STOCK_NO_CACHE}. What a turn generates is kept there, too, which is "
            "not vLLM's default."
        )
    if settings.replicas > 1:
        lines.append("A program that was refused counts for the JCTs of all as if it were waiting until the run's end.")
    if told:
        lines.append(f"Told true lengths and durations{noise}: {', '.join(told)}.")
    if learn:
        by = f", and forecasts of {settings.forecasts} fitted on other groups" if settings.forecasts else ""
        lines.append(f"Know the tool's name and what they have learnt in the run{by}: {', '.join(learn)}.")
    capacity = _mean([result.capacity_per_s for result in results])
    restore = "restored from the host for nothing" if settings.host_gib else "held in memory or computed again"
    lines.append(
        f"Fluid bound: capacity {_number(capacity)} programs/s if steps are as full as memory allows and contexts are "
        f"{restore}, as is best; beyond it, the programs of least work are served."
    )
    if settings.command:
        lines.append(f"Command: {settings.command}")
    return lines


def write_plot(results: Sequence[RunResult], settings: SimulationSettings, folder: Path) -> Path:
    """Write ``goodput_over_rate.png``: each policy's mean over the seeds, each seed a point, and the fluid bound."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.5))
    rates = sorted(settings.rates_per_s)
    for column, label in _columns(settings).items():
        of_column = [r for r in results if (r.run.policy, r.run.router) == column]
        by_rate = [[r.summary.goodput.programs_per_s for r in of_column if r.run.rate_per_s == rate] for rate in rates]
        (line,) = axes.plot(rates, [_mean(values) for values in by_rate], marker="o", label=label.replace("\n", ", "))
        for rate, values in zip(rates, by_rate, strict=True):
            axes.plot([rate] * len(values), values, ".", color=line.get_color(), alpha=0.5)
    bounds = [_mean([r.bound_per_s for r in results if r.run.rate_per_s == rate]) for rate in rates]
    axes.plot(rates, bounds, color="grey", linestyle="--", label=BOUND)
    axes.set(xlabel="offered programs per second", ylabel="good programs per second", ylim=(0, None))
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    path = folder / "goodput_over_rate.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _recovery_json(recovery: Recovery) -> dict[str, Any]:
    return {
        "recovered_s": recovery.recovered_s,
        "windows": [{**asdict(window), "attainment": window.attainment} for window in recovery.windows],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
