"""vLLM's router and ours on a real machine: two replicas of the same model, the same programs at the same times.

    python -m benchmarks.peer_routers [--peers FOLDER] [--rate 2] [--duration-s 60] [--trace FILE]
        [--subjects program,cache_aware,caesura/vllm,caesura/caesura]

`vllm-router` is an HTTP proxy and has a scheduler of programs (``--enable-program-scheduling``), which holds turns back
in front of a full replica. It cannot run under virtual time, because it reads its replicas' metrics and its clock. So
it stands before two servers of vLLM's own (`program`; `cache_aware` is the same proxy with its default policy). Ours
stands before two of our replicas with vLLM's scheduler (`caesura/vllm`: the router alone) and with ours
(`caesura/caesura`). All replicas have the model, the memory and the limits of `benchmarks.live_against_simulated`.
vllm-router gets the memory of a replica and the step costs that `caesura profile` measures.

The subjects run one after the other. Hits are of the tokens that a program's turn before had, those that needed no
computation. Exit status 1 where a turn failed, 77 if vllm-router is absent. Run it on an idle machine: the processes of
all replicas share its processors.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks import peer_packages
from benchmarks.live_against_simulated import SHAPE, SLO_TTFT_S, Replica, StreamChunk, profiled, write_model
from benchmarks.live_routers import REPLICAS
from benchmarks.results import save
from benchmarks.router_rows import cell
from benchmarks.served import STOP_WITHIN_S, served
from cluster.core.slo import Outcome, Slo
from cluster.local.ports import free_ports
from cluster.offline.bench.results import BenchResult, by_policy
from cluster.offline.bench.runner import run_bench
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Shaping
from replicas.cost_model import CostModel
from replicas.settings import CPU_ENVIRONMENT

PROGRAM, CACHE_AWARE = "program", "cache_aware"
OURS = ("caesura/vllm", "caesura/caesura")
SUBJECTS = (PROGRAM, CACHE_AWARE, *OURS)
START_WITHIN_S = 300.0
MODULE = "vllm_router.launch_router"
CAPACITY_TOKENS = (SHAPE.num_blocks - 1) * SHAPE.block_size  # one is vLLM's null block
THOUSAND = 1000


def program_scheduling(cost: CostModel, capacity_tokens: int) -> dict[str, Any]:
    """Return the configuration of vllm-router's program scheduling for replicas of this cost and memory.

    A program is a session: the client sends its id in ``x-session-id``. The rest are the defaults, with the global
    queue, which its documentation recommends.
    """
    return {
        "program_scheduling_enable_key": "auto",
        "global_queue": True,
        "token_capacity_per_dp_rank": capacity_tokens,
        "prefill_cost_model": {
            "intercept_seconds": cost.overhead_s + cost.sequence_s,
            "linear_seconds_per_1k_tokens": THOUSAND * (cost.token_s + cost.context_s),
            "quadratic_seconds_per_1k_tokens_squared": THOUSAND**2 * cost.pair_s / 2,
        },
        "decode_throughput_model": {
            "fixed_step_seconds": cost.overhead_s + cost.weights_s,
            "batch_step_seconds_per_request": cost.sequence_s,
            "context_step_seconds_per_token": cost.context_s + cost.pair_s,
        },
    }


def router_arguments(subject: str, ports: tuple[int, int], workers: Sequence[str], cost: CostModel) -> list[str]:
    """Return vllm-router's arguments. ``ports``: its own and its metrics'."""
    own, metrics = ports
    arguments = ["--host", "127.0.0.1", "--port", str(own), "--prometheus-port", str(metrics), "--log-level", "error"]
    arguments += ["--worker-urls", *workers, "--disable-retries"]
    if subject == PROGRAM:
        scheduling = json.dumps(program_scheduling(cost, CAPACITY_TOKENS))
        return [*arguments, "--enable-program-scheduling", "--program-scheduling-config-json", scheduling]
    return [*arguments, "--policy", subject]


def server_arguments(model: Path, port: int) -> list[str]:
    """Return the arguments of one of vLLM's own servers."""
    arguments = {
        "model": model,
        "served-model-name": "random",
        "load-format": "dummy",
        "host": "127.0.0.1",
        "port": port,
        "block-size": SHAPE.block_size,
        "num-gpu-blocks-override": SHAPE.num_blocks,
        "max-num-seqs": SHAPE.max_num_seqs,
        "max-num-batched-tokens": SHAPE.max_num_batched_tokens,
        "max-model-len": SHAPE.max_model_len,
        "kv-cache-memory-bytes": 1 << 29,
        "stream-interval": 32,
        "distributed-executor-backend": "uni",
    }
    flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
    return [*flags, *(part for name, value in arguments.items() for part in (f"--{name}", str(value)))]


@contextmanager
def process(module: str, arguments: Sequence[str], url: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a Python module until the end of the context, and wait until ``url``/health answers.

    Raises:
        RuntimeError: it ends, or does not answer in time.
    """
    command = [sys.executable, "-m", module, *arguments]
    running = subprocess.Popen(command, env={**psutil.Process().environ(), **environment}, stdout=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + START_WITHIN_S
        while not _answers(url):
            if running.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"{module} did not start")
            time.sleep(0.2)
        yield
    finally:
        running.terminate()
        running.wait(STOP_WITHIN_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


@contextmanager
def peer(subject: str, model: Path, cost: CostModel) -> Iterator[str]:
    """Run vllm-router before two of vLLM's own servers; yield its URL."""
    ports = free_ports(REPLICAS + 2, "127.0.0.1")
    own, metrics, *servers = ports
    urls = [f"http://127.0.0.1:{port}" for port in servers]
    engine = {**CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    with ExitStack() as stack:
        for port, url in zip(servers, urls, strict=True):
            module = "vllm.entrypoints.openai.api_server"
            stack.enter_context(process(module, server_arguments(model, port), url, engine))
        url = f"http://127.0.0.1:{own}"
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = router_arguments(subject, (own, metrics), urls, cost)
        stack.enter_context(process(MODULE, arguments, url, paths))
        yield url


def scheduled_programs(url: str) -> int | None:
    """Return how many programs vllm-router's scheduler has seen; None if it has no scheduler of programs."""
    answer = httpx.get(f"{url}/scheduling/diagnostics")
    if not answer.is_success:
        return None
    return programs_in(answer.json())


def programs_in(diagnostics: Mapping[str, Any]) -> int:
    """Return the number of programs in the diagnostics of vllm-router."""
    return sum(len(rank["programs"]) for rank in diagnostics["ranks"])


def row_of(subject: str, result: BenchResult, programs: int | None) -> dict[str, Any]:
    """Return the row of a subject, with what a client can measure of any server."""
    [summary] = by_policy(result)
    ended = [program for block in result.blocks for program in (*block.warmup, *block.measured)]
    turns = [turn for program in ended for turn in program.turns]
    later = [turn for turn in turns if turn.outcome is Outcome.OK and turn.index]
    known = sum(turn.previous_context_tokens for turn in later)
    found = sum(min(turn.cached_tokens or 0, turn.previous_context_tokens) for turn in later)
    return {
        "subject": subject,
        "replicas": REPLICAS,
        "goodput_programs": summary.goodput.programs_per_s,
        "jct_mean_s": summary.distributions["jct_s"].mean,
        "ttft_p50_s": summary.distributions["ttft_s"].p50,
        "ttft_p99_s": summary.distributions["ttft_s"].p99,
        "hit_rate": found / known if known else None,
        "offered": summary.goodput.offered_programs,
        "completed": summary.goodput.completed_programs,
        "failed_turns": sum(turn.outcome is Outcome.FAILED for turn in turns),
        "rejected_turns": sum(turn.outcome is Outcome.REJECTED for turn in turns),
        "scheduled_programs": programs,
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    print(" ".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{cell(value):>18}" for value in row.values()))


def settings_of(arguments: argparse.Namespace, url: str) -> BenchSettings:
    """Return what each subject is asked."""
    return BenchSettings(
        url=url,
        trace=arguments.trace,
        shaping=Shaping(scale_tools=0.1, max_context=SHAPE.max_model_len - 8, max_turns=6),
        rate_per_s=arguments.rate,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        seed=arguments.seed,
        slo=Slo(SLO_TTFT_S),
        drain_s=arguments.drain_s,
    )


def measure(subject: str, model: Path, cost: CostModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a subject, replay the programs, and return its row."""
    if subject in OURS:
        router, _, policy = subject.partition("/")
        with served("live_routers", router, policy, str(model)) as url:
            return row_of(subject, asyncio.run(run_bench(settings_of(arguments, url), StreamChunk())), None)
    with peer(subject, model, cost) as url:
        result = asyncio.run(run_bench(settings_of(arguments, url), StreamChunk()))
        return row_of(subject, result, scheduled_programs(url) if subject == PROGRAM else None)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_packages.add_option(parser)
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help="with commas")
    parser.add_argument("--trace", type=Path, default=None, help="programs; else the built-in workload")
    parser.add_argument("--rate", type=float, default=2.0, help="programs per second, of both replicas")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--warmup-s", type=float, default=10.0)
    parser.add_argument("--drain-s", type=float, default=60.0, help="seconds after the last arrival to wait")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    subjects = arguments.subjects.split(",")
    if unknown := set(subjects) - set(SUBJECTS):
        parser.error(f"--subjects: no {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    peer_packages.use(arguments.peers)
    if (why := peer_packages.why_absent(MODULE)) is not None:
        print(why)
        return peer_packages.SKIPPED
    rows = []
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model)
        cost = asyncio.run(profiled(Replica.on_cpu(model)))
        for subject in subjects:
            print(subject, flush=True)
            rows.append(measure(subject, model, cost, arguments))
    print_rows(rows)
    save("peer_routers", rows, arguments.json)
    return 1 if any(row["failed_turns"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
