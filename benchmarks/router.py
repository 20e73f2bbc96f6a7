"""Routers side by side under virtual time: where programs are placed, at a load that hurts, and past the cliff.

    python -m benchmarks.router [--replicas 16] [--jobs 2] [--rate 0.05] [--seed 0,1,2] [--minutes 20]
        [--only placement|cliff] [--routers consistent_hash,kv_aware] [--claimed] [--untiered] [--scan] [--trace FILE]
        [--memory 20]

One row a router; with several seeds each number is their mean, and so are the claims. Claims are for systems as they
come: ours, router and scheduler, against Ray's routers and Dynamo's cost before vLLM's own scheduler, all with the same
memory and no host tier. The best of these stand before our scheduler, too: that is what a router alone is worth, and
printed beside the claims. One of each has a host tier (`+host`). `kv_aware` is Dynamo's published cost on exact
knowledge of all caches; the others are Ray's algorithms.

Programs are recorded coding agents: sessions with minutes between some turns for the placement (kvtester_cc), ones with
short tools for the cliff (iso_bench_trae), of up to 65,536 tokens, on Llama-3.1-8B and H100s. Where the recordings
(``../shared/data``) are absent, both are the built-in workload on OPT-13B and H800s, which is another matter.

The load is where the best peer's mean completion has doubled against that at a low one, which is run, too; ``--scan``
finds it.
Completion is without tools; programs that have not completed count with the time that they have taken so far. The run
ends ``--drain-s`` after the last arrival; `ended` says how many programs had completed by then, of those offered.
`jct_mean_s` leaves out programs that were refused at once. `completion_offered_s` counts them until the run's end, and
the claims are of it.

A last row is what is left to any router: memory of which nothing is ever lost, and turns that go wherever the least is
under way and find all of their KV there (`cluster.offline.simulator.peers`).

With ``--memory`` replicas have so many times their device's memory for KV: where nothing is ever lost, what is left to
be won by a router is an even load.

The cliff is a closed loop: so many programs are under way at all times, up to twice what fits the memory, with our
admission and without it. Throughput is generated tokens.

Exit status 1 where one of ``SHOWS`` is missed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results import DIRECTORY, save
from benchmarks.router_rows import DRAIN_S, cell, completion_s, means, print_rows, row_of
from benchmarks.router_subjects import (
    AMPLE,
    BOUND,
    BUILT_IN,
    CLIMBERS,
    COMPARED,
    OURSELVES,
    PEERS,
    RECORDED,
    RECORDINGS,
    Scene,
    Subject,
)
from cluster.offline.bench.workload import Shaping
from cluster.offline.simulator.routers import OURS
from cluster.offline.simulator.run import RunResult, load_workload, runs_of, simulate
from cluster.offline.simulator.settings import SimulationSettings
from replicas.presets import cost_model

REPLICAS = 16
CLIFF_REPLICAS = 4
CLIFF = (0.5, 1.0, 1.5, 2.0)
"""Of the programs that fit."""
CLIFF_MINUTES, CLIFF_WARMUP_MINUTES = 6.0, 4.0


def simulate_all(every: Sequence[SimulationSettings], jobs: int) -> list[RunResult]:
    """One run each, in order, so many at a time."""
    work = [(settings, runs_of(settings)[0]) for settings in every]
    results: list[RunResult] = []
    with get_context("spawn").Pool(jobs, _quiet) as pool:
        for result in pool.imap(_simulate, work):
            results.append(result)
            run = result.run
            print(f"  ... {len(results)} of {len(work)}: {run.router}, {run.policy}, {result.wall_s:.0f} s", flush=True)
    return results


def _quiet() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _simulate(work: tuple[SimulationSettings, Any]) -> RunResult:
    return simulate(*work)


def compare(
    subjects: Sequence[Subject], base: SimulationSettings, rates: Sequence[float], jobs: int
) -> list[dict[str, Any]]:
    """Routers at some loads, programs per second and replica, once with each seed: a row a run."""
    points = [(rate, subject, seed) for rate in rates for subject in subjects for seed in base.seeds]
    every = [replace(subject.settings(base, rate * base.replicas), seeds=(seed,)) for rate, subject, seed in points]
    return [
        {"rate_per_replica": rate, "seed": seed, **row_of(subject, result)}
        for (rate, subject, seed), result in zip(points, simulate_all(every, jobs), strict=True)
    ]


def doubled(rows: Sequence[dict[str, Any]], rates: Sequence[float]) -> float | None:
    """The first load at which no peer's completion is below twice the best one's at the lowest load."""
    best = {rate: min(completion_s(row) for row in rows if row["rate_per_replica"] == rate) for rate in rates}
    return next((rate for rate in rates if best[rate] >= 2 * best[rates[0]]), None)


def programs_that_fit(base: SimulationSettings) -> int:
    """Memory of all replicas over a program's KV, each turn's at its end, in the mean over turns."""
    lengths = [
        context + turn.output_tokens
        for program in load_workload(base, base.seeds[0]).programs
        for context, turn in zip(program.contexts(), program.turns, strict=True)
    ]
    return round(base.replicas * base.cost_model().kv_capacity_tokens / (sum(lengths) / len(lengths)))


def climb(base: SimulationSettings, jobs: int) -> list[dict[str, Any]]:
    """Throughput over concurrency."""
    fit = programs_that_fit(base)
    points = [(subject, part) for subject in CLIMBERS for part in CLIFF]
    every = [replace(subject.settings(base, 1.0), under_way=round(part * fit)) for subject, part in points]
    return [
        {"of_what_fits": part, "under_way": round(part * fit), "name": subject.name, **row_of(subject, result)}
        for (subject, part), result in zip(points, simulate_all(every, jobs), strict=True)
    ]


def print_cliff(rows: Sequence[dict[str, Any]]) -> None:
    print("  under way, of what fits: generated tokens/s (cached tokens, of an infinite cache's)")
    for subject in CLIMBERS:
        cells = [
            f"{row['of_what_fits']:g}: {row['tokens_per_s']:,.0f} ({cell(row['hit_rate'])})"
            for row in rows
            if row["name"] == subject.name
        ]
        print(f"  {subject.name:40} " + "   ".join(cells))


def plot_cliff(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7.0, 6.5))
    for subject in CLIMBERS:
        own = [row for row in rows if row["name"] == subject.name]
        x = [row["of_what_fits"] for row in own]
        above.plot(x, [row["tokens_per_s"] for row in own], marker="o", label=subject.name)
        below.plot(x, [row["hit_rate"] for row in own], marker="o", label=subject.name)
    above.set(ylabel="generated tokens/s", ylim=(0, None))
    below.set(ylabel="cached, of an infinite cache's", xlabel="programs under way, of what fits", ylim=(0, 1.05))
    above.legend()
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


Claim = tuple[str, float, bool]
"""What is claimed, what it is, and whether it holds."""


def against(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Its completion and its goodput over the best ones of the others, which may be of two of them."""
    best = max(other["goodput_programs"] for other in others)
    completion = completion_s(row) / min(map(completion_s, others))
    return completion, row["goodput_programs"] / best if best else 0.0


def placement_shows(
    ours: dict[str, Any], peers: Sequence[dict[str, Any]], low: Sequence[dict[str, Any]]
) -> list[Claim]:
    """Of the comparison at one load, and the peers at a low one."""
    fastest = min(map(completion_s, peers))
    risen = fastest / min(map(completion_s, low))
    jct, goodput = against(ours, peers)
    hit_rate = ours["hit_rate"] or 0.0
    return [
        ("the best peer's completion has doubled against that at a low load", risen, risen >= 2),
        ("mean completion <= 0.7 x the best peer's", jct, jct <= 0.7),
        ("goodput >= 1.5 x the best peer's", goodput, goodput >= 1.5),
        ("KV hit rate >= 0.95 of an infinite cache's", hit_rate, hit_rate >= 0.95),
        ("largest replica's load <= 1.25 x the mean", ours["load_max_over_mean"], ours["load_max_over_mean"] <= 1.25),
        ("split programs: 0", float(ours["split"]), ours["split"] == 0),
    ]


def cliff_shows(cliff: Sequence[dict[str, Any]]) -> list[Claim]:
    """Of the closed loop."""
    own = {row["of_what_fits"]: row["tokens_per_s"] for row in cliff if row["name"] == OURSELVES.name}
    past = own[max(CLIFF)] / max(own.values())
    return [("throughput at twice what fits >= 0.9 x its peak", past, past >= 0.9)]


def main(argv: list[str] | None = None) -> int:
    """Print the tables; exit status 1 where a claim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--rate", type=float, default=None, help="programs per second and replica")
    parser.add_argument("--minutes", type=float, default=None, help="measured, of each run")
    parser.add_argument("--warmup", type=float, default=None, help="minutes before them")
    parser.add_argument("--drain-s", type=float, default=DRAIN_S, help="seconds after the last arrival")
    parser.add_argument("--built-in", action="store_true", help="replay the built-in workload")
    parser.add_argument("--arrivals", default="poisson")
    parser.add_argument("--seed", type=_seeds, default=(0,), help="one, or several by comma: each is a run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("placement", "cliff"), default=None)
    parser.add_argument("--routers", default=None, help="only these of the routers, by comma; ours is always there")
    parser.add_argument("--claimed", action="store_true", help="only what the claims are of: ours and the peers")
    parser.add_argument("--untiered", action="store_true", help="without the rows that have a host tier")
    parser.add_argument("--trace", type=Path, default=None, help="for the placement, in place of the recording")
    parser.add_argument("--memory", type=float, default=1.0, help="for KV, in times the device's")
    parser.add_argument("--scan", action="store_true", help="only find the load at which the best peer has doubled")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=DIRECTORY / "router_cliff.png")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.memory < float("inf"):
        parser.error("--memory: must be more than 0, and finite")
    _quiet()
    with TemporaryDirectory() as directory:
        return _run(arguments, parser, Path(directory))


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser, directory: Path) -> int:
    scene = BUILT_IN if arguments.built_in or not RECORDINGS.is_dir() else RECORDED
    compared = _compared(arguments.routers, parser)
    if arguments.claimed:
        compared = tuple(subject for subject in compared if subject is OURSELVES or subject.is_peer)
    if arguments.untiered:
        compared = tuple(subject for subject in compared if not subject.host_gib)
    peers = tuple(subject for subject in compared if subject.is_peer)
    base = SimulationSettings(
        policies=("caesura",),
        rates_per_s=(1.0,),
        preset=_with_memory(scene.preset, arguments.memory, directory),
        trace=arguments.trace or scene.trace,
        only_recorded=(arguments.trace or scene.trace) is not None,
        shaping=Shaping(max_context=scene.max_context),
        minutes=scene.minutes if arguments.minutes is None else arguments.minutes,
        warmup_minutes=scene.warmup_minutes if arguments.warmup is None else arguments.warmup,
        drain_s=arguments.drain_s,
        seeds=arguments.seed,
        arrivals=arguments.arrivals,
        replicas=arguments.replicas,
    )
    if arguments.scan:
        rows = compare(peers, base, scene.scan, arguments.jobs)
        for rate in scene.scan:
            print(f"{rate:g} programs per second and replica")
            print_rows(means([row for row in rows if row["rate_per_replica"] == rate]))
        print(f"The best peer's completion has doubled at: {doubled(means(rows), scene.scan)}")
        save("router", rows, arguments.json or DIRECTORY / "router_scan.json")
        return 0
    claims: list[Claim] = []
    if arguments.only in (None, "placement"):
        claims += placement(compared, peers, base, scene, arguments, directory)
    if arguments.only in (None, "cliff"):
        claims += past_the_cliff(base, scene, arguments)
    for claim, value, holds in claims:
        print(f"  {'met   ' if holds else 'MISSED'} {value:7.3f}  {claim}")
    return 0 if all(holds for _, _, holds in claims) else 1


def _with_memory(preset: str, times: float, directory: Path) -> str:
    """A preset like this one, but for the size of its KV memory: a file in ``directory``."""
    if times == 1:
        return preset
    model, path = cost_model(preset), directory / "preset.json"
    replace(model, kv_capacity_tokens=int(times * model.kv_capacity_tokens)).save(path)
    return str(path)


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(seed) for seed in text.split(",") if seed.strip().isdecimal())
    if len(set(seeds)) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"numbers by comma, each once, not {text!r}")
    return seeds


def _compared(routers: str | None, parser: argparse.ArgumentParser) -> tuple[Subject, ...]:
    if routers is None:
        return COMPARED
    chosen = set(routers.split(",")) | {OURS}
    if unknown := chosen - {OURS, *PEERS}:
        parser.error(f"--routers: no {', '.join(sorted(unknown))}; there are {', '.join((OURS, *PEERS))}")
    if not chosen & set(PEERS):
        parser.error("--routers: name a peer to compare with")
    return tuple(subject for subject in COMPARED if subject.router in chosen)


def placement(
    compared: Sequence[Subject],
    peers: Sequence[Subject],
    base: SimulationSettings,
    scene: Scene,
    arguments: argparse.Namespace,
    directory: Path,
) -> list[Claim]:
    """Every router at one load."""
    rate = arguments.rate or scene.rate
    at_low = compare(peers, base, scene.scan[:1], arguments.jobs)
    low = means(at_low)
    print(f"{scene.scan[0]:g} programs per second and replica, {arguments.arrivals}")
    print_rows(low)
    runs = compare(compared, base, (rate,), arguments.jobs)
    rows, bounds = means(runs), list[dict[str, Any]]()
    if not arguments.claimed:
        memory = max(AMPLE, arguments.memory)
        ample = replace(base, preset=_with_memory(scene.preset, memory, directory))
        of_bound = [{**row, "memory": memory} for row in compare([BOUND], ample, (rate,), arguments.jobs)]
        runs, bounds = runs + of_bound, means(of_bound)
    print(f"{rate:g} programs per second and replica, {arguments.arrivals}")
    print_rows([*rows, *bounds])
    save("router", at_low + runs, arguments.json)
    by_subject = dict(zip(compared, rows, strict=True))
    best = min((by_subject[peer] for peer in peers), key=completion_s)
    own_low = next(row for row in low if row["router"] == best["router"])
    print(f"  {best['router']}, against itself at the low load: {completion_s(best) / completion_s(own_low):.3f} x")
    alone = [row for subject, row in by_subject.items() if subject.is_router_alone]
    for name, taken, others in (
        ("ours against the best router before our scheduler", [by_subject[OURSELVES]], alone),
        ("a router that has all KV everywhere, against the same", bounds, alone),
        ("a router that has all KV everywhere, against the best peer", bounds, [by_subject[peer] for peer in peers]),
    ):
        if taken and others:
            completion, goodput = against(taken[0], others)
            print(f"  {name}: completion {completion:.3f} x, goodput {goodput:.3f} x")
    return placement_shows(by_subject[OURSELVES], [by_subject[peer] for peer in peers], low)


def past_the_cliff(base: SimulationSettings, scene: Scene, arguments: argparse.Namespace) -> list[Claim]:
    """A closed loop of more and more programs."""
    few = min(CLIFF_REPLICAS, arguments.replicas)
    minutes = CLIFF_MINUTES if arguments.minutes is None else arguments.minutes
    warmup = CLIFF_WARMUP_MINUTES if arguments.warmup is None else arguments.warmup
    loop = replace(base, trace=scene.cliff_trace, replicas=few, drain_s=0.0, minutes=minutes, warmup_minutes=warmup)
    cliff = climb(loop, arguments.jobs)
    print_cliff(cliff)
    print(f"  plot: {plot_cliff(cliff, arguments.plot)}")
    path = DIRECTORY / "router_cliff.json" if arguments.json is None else arguments.json.with_suffix(".cliff.json")
    save("router", cliff, path)
    return cliff_shows(cliff)


if __name__ == "__main__":
    sys.exit(main())
