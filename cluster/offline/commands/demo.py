"""`caesura demo`: start a local cluster, replay agent programs against it, compare the policies, and stop it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.offline.commands._common import timed_steps, writing

if TYPE_CHECKING:
    from cluster.config.schema import CaesuraConfig

CONFIG: dict[str, Any] = {
    # There is no host tier, so that evicted KV is recomputed.
    "replicas": {"count": 2, "cpu_offload_bytes": 0},
    # Each replica has memory for about 3,200 tokens. Programs compete for it, as on a full GPU.
    "engine": {"max_model_len": 3072, "num_gpu_blocks_override": 102, "max_num_seqs": 64},
    "policy": {"name": "continuum", "parameters": {"max_ttl_s": 0.5, "default_ttl_s": 0.25}},
    "http": {"port": 0},
}
"""Configuration of the demo's cluster. Tools run 20 times faster than recorded, so `continuum` has short times, too."""

POLICIES = ("vllm", "continuum", "augserve", "caesura")
LOAD = 0.9
"""Arrivals of a block, as a part of what the machine serves at most under the first policy."""
CONCURRENCY = 12
WARMUP_S = 5.0
MEASURED_S = 20.0
"""The closed loop that finds what the machine serves: programs at a time, seconds before it is measured, seconds."""
DURATION_S = 30.0
BLOCKS = 2
SCALE_TOOLS = 0.05
MAX_CONTEXT_TOKENS = 3000
MAX_TURNS = 6
SLO_TTFT_S = 1.0

EXPLANATION = (
    "All columns served the same programs at the same times; only the scheduler's policy was switched in between.",
    "`vllm` forgets a program at each tool call: its KV is evicted by others and computed again at its next turn.",
    "`continuum` keeps the KV through short calls and serves older programs first: see recomputed tokens.",
    "`augserve` keeps it where that wastes least, and serves first what needs the least memory for the least time.",
    "`caesura`, the default, keeps it while that pays, and serves first the turns that can still begin in time.",
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the JSON lines, plots and the report.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Same seed, same programs and arrivals.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that was measured.")] = False,
) -> None:
    """Start two replicas here, compare the policies on agent programs, let the cluster run whole programs, stop."""
    with writing("--out"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").touch()
    from rich.console import Console

    from cluster.core.slo import Slo
    from cluster.local.cluster import LocalCluster, StartFailed
    from cluster.offline.bench.record import bench_lines, write
    from cluster.offline.bench.runner import run_bench
    from cluster.offline.bench.saturation import saturated_programs_per_s
    from cluster.offline.bench.settings import BenchSettings
    from cluster.offline.bench.tables import print_report, write_json_lines
    from cluster.offline.bench.terminal import RunProgress
    from cluster.offline.bench.workload import Shaping
    from cluster.offline.demo.server_side import print_server_side, run_programs
    from cluster.offline.demo.tools import notes_server, sandboxed
    from cluster.offline.report.page import render
    from cluster.offline.report.plots import write_plots
    from cluster.offline.report.reading import read

    console = Console(highlight=False)
    step = timed_steps(console)
    console.print("Starting two vLLM replicas of the built-in random model on this machine:")
    try:
        with notes_server() as notes_url, LocalCluster(_config(notes_url), step=step) as cluster:
            settings = BenchSettings(
                url=cluster.url,
                shaping=Shaping(scale_tools=SCALE_TOOLS, max_context=MAX_CONTEXT_TOKENS, max_turns=MAX_TURNS),
                policies=POLICIES,
                duration_s=DURATION_S,
                blocks=BLOCKS,
                seed=seed,
                slo=Slo(SLO_TTFT_S),
                command="make demo",
                record=True,
            )
            with step("what the machine serves"):
                most_per_s = asyncio.run(
                    saturated_programs_per_s(
                        settings, concurrency=CONCURRENCY, warmup_s=WARMUP_S, measured_s=MEASURED_S
                    )
                )
            settings = replace(settings, rate_per_s=round(LOAD * most_per_s, 2))
            console.print(
                f"\nUnder {POLICIES[0]}, this machine serves {most_per_s:.2f} agent programs a second at most. Now"
                f" programs of six kinds arrive at {settings.rate_per_s} a second, {BLOCKS} blocks a policy:",
                soft_wrap=True,
            )
            with RunProgress(BLOCKS) as progress:
                result = asyncio.run(run_bench(settings, progress))
            print_report(result, console, verbose=verbose)
            write_json_lines(result, out / "results.jsonl")
            record, page = out / "record.jsonl", out / "report.html"
            write(bench_lines(result), record)
            runs = read([record])
            page.write_text(render(runs), encoding="utf-8")
            written = (*write_plots(runs, out), page)
            console.print("\nAnd whole programs in one request each, their tools run by the cluster:")
            if not sandboxed():
                console.print("(bubblewrap is not installed here: the shell tool runs with limits, but no sandbox)")
            with step("whole programs"):
                ran = asyncio.run(run_programs(cluster.url, cluster.config.model.id))
            print_server_side(ran, console)
    except StartFailed as error:
        console.print(f"caesura demo: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    for path in written:
        console.print(f"Wrote {path}", markup=False, soft_wrap=True)
    console.print()
    for line in EXPLANATION:
        console.print(line, markup=False, soft_wrap=True)


def _config(notes_url: str) -> "CaesuraConfig":
    from cluster.config.schema import CaesuraConfig
    from cluster.offline.demo.tools import tools

    return CaesuraConfig.model_validate({**CONFIG, "tools": tools(notes_url)})
