"""vLLM's router and ours on a real machine: two replicas of the same model, the same programs at the same times.

    python -m benchmarks.peer_routers [--peers FOLDER] [--rate 2] [--duration-s 60] [--trace FILE]
        [--subjects program,cache_aware,caesura/vllm,caesura/caesura]

`vllm-router` is an HTTP proxy and has a scheduler of programs (``--enable-program-scheduling``), which holds turns back
in front of a full replica. It cannot run under virtual time, because it reads its replicas' metrics and its clock. So
it stands before two servers of vLLM's own (`program`; `cache_aware` is the same proxy with its default policy). Ours
stands before two of our replicas with the policy `vllm` (`caesura/vllm`: hardly more than the router) and with ours
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
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks import peer_packages
from benchmarks.live_against_simulated import SHAPE, Replica, StreamChunk, profiled
from benchmarks.live_routers import REPLICAS, add_options, measures_of, print_rows, settings_of
from benchmarks.random_model import write_model
from benchmarks.results import save
from benchmarks.served import foreign_server, served
from cluster.local.ports import free_ports
from cluster.offline.bench.results import BenchResult
from cluster.offline.bench.runner import run_bench
from replicas.cost_model import CostModel
from replicas.settings import CPU_ENVIRONMENT

PROGRAM, CACHE_AWARE = "program", "cache_aware"
OURS = ("caesura/vllm", "caesura/caesura")
SUBJECTS = (PROGRAM, CACHE_AWARE, *OURS)
MODULE = "vllm_router.launch_router"
PYTHON = (sys.executable, "-m")
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
def peer(subject: str, model: Path, cost: CostModel) -> Iterator[str]:
    """Run vllm-router before two of vLLM's own servers; yield its URL."""
    ports = free_ports(REPLICAS + 2, "127.0.0.1")
    own, metrics, *servers = ports
    urls = [f"http://127.0.0.1:{port}" for port in servers]
    engine = {**CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    with ExitStack() as stack:
        for port, url in zip(servers, urls, strict=True):
            command = [*PYTHON, "vllm.entrypoints.openai.api_server", *server_arguments(model, port)]
            stack.enter_context(foreign_server(command, url, engine))
        url = f"http://127.0.0.1:{own}"
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = router_arguments(subject, (own, metrics), urls, cost)
        stack.enter_context(foreign_server([*PYTHON, MODULE, *arguments], url, paths))
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
    return {"subject": subject, "replicas": REPLICAS, **measures_of(result), "scheduled_programs": programs}


def measure(subject: str, model: Path, cost: CostModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a subject, replay the programs, and return its row."""
    router, _, policy = subject.partition("/")
    ours = subject in OURS
    with served("live_routers", router, policy, str(model)) if ours else peer(subject, model, cost) as url:
        result = asyncio.run(run_bench(settings_of(arguments, url), StreamChunk()))
        return row_of(subject, result, scheduled_programs(url) if subject == PROGRAM else None)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_packages.add_option(parser)
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help="with commas")
    add_options(parser, rate_per_s=2.0, drain_s=60.0)
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
