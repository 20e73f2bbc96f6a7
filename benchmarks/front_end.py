"""Tokens a second, first token and CPU time of the ways from a client to vLLM, same engine arguments, in one run.

    python -m benchmarks.front_end [--rounds 3] [--subjects ray caesura haproxy proxy]
                                   [--streams 1 16 64 256] [--tokens 64] [--flames DIRECTORY]
                                   [--accelerator gpu --model FOLDER]

The subjects are vLLM's own server (`vllm`), plain `ray.serve.llm` (`ray`) with HAProxy and Ray's settings for
throughput, and Caesura: with clients at the ingress (`caesura`), and with Ray Serve's HAProxy (`haproxy`) or Ray's own
proxy (`proxy`) in front of it. Each has one replica of the built-in model, in processes of its own. They take turns,
the order swapped each round; those that wait are idle. Tokens a second and first tokens are medians over the rounds.
CPU seconds are those of a subject's processes while its streams run, by the process's role, for 1,000 tokens.
``--flames`` writes a flame graph (py-spy) of each role at the largest number of streams. ``--accelerator gpu`` compares
on a GPU, which the servers share, with the model of a folder.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.results import kept_rows, save
from benchmarks.served import STOP_WITHIN_S, foreign_server, serve, serving
from benchmarks.streams import REQUESTS_EACH, measure
from cluster.config.schema import CaesuraConfig
from cluster.local.haproxy import ENABLE
from cluster.local.ports import free_ports
from replicas.settings import CPU_ENVIRONMENT
from replicas.tiny.model import tiny_model_directory

VLLM, RAY, CAESURA, HAPROXY, PROXY = "vllm", "ray", "caesura", "haproxy", "proxy"
ENVIRONMENTS: dict[str, dict[str, str]] = {
    RAY: {ENABLE: "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    CAESURA: {},
    HAPROXY: {ENABLE: "1"},
    PROXY: {ENABLE: "0"},
}
"""Environment variables of the subjects that are Ray clusters."""
TARGETS = {16: 0.95, 64: 0.90, 256: 0.85}
"""Streams, and how many times vLLM's own throughput ours has to reach."""
FALL = 0.1
"""A ratio that is this part below that of the kept run fails the command."""
FLAME_S = 8.0
FLAMES = ("server", "proxy", "ingress", "replica")

KV_BYTES = 64 << 20
ENGINE = {"max_model_len": 2048, "max_num_seqs": 256}
CONFIG: dict[str, Any] = {
    "replicas": {"count": 1, "kv_cache_bytes": KV_BYTES},
    "engine": ENGINE,
    "policy": {"name": "caesura"},
}
GPU_KV_BYTES = 2 << 30
GPU_ENGINE = {**ENGINE, "kv_cache_memory_bytes": GPU_KV_BYTES, "gpu_memory_utilization": 0.3}
"""Engine arguments on a GPU: every server gets the same small part of its memory."""
MODEL_VARIABLE = "CAESURA_FRONT_END_MODEL"
"""Environment variable by which the processes of the subjects receive the folder of the model on a GPU."""

ROLES = {
    "EngineCore": "engine",
    "ProgramServer": "replica",
    "LLMServer": "replica",
    "Ingress": "ingress",
    "ProxyActor": "proxy",
    "haproxy": "proxy",
    "openai.api_server": "server",
}
"""By a part of the command line, what a process does on the way of a token. The first match counts."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A server under test: its URL, and its first process."""

    url: str
    pid: int

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Its processes, each with its role."""
        first = psutil.Process(self.pid)
        for process in (first, *first.children(recursive=True)):
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue  # it has ended meanwhile
            yield next((role for part, role in ROLES.items() if part in line), "other"), process

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by role."""
        found: dict[str, float] = defaultdict(float)
        for role, process in self.processes():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found[role] += times.user + times.system
        return found


def be(name: str) -> None:
    """Serve as one of the subjects that are Ray clusters."""
    os.environ.update(ENVIRONMENTS[name])
    serve(config_of(os.environ.get(MODEL_VARIABLE)), deploy_plain if name == RAY else None)


def config_of(model: str | None) -> CaesuraConfig:
    """The configuration of a subject that is a Ray cluster: on a GPU if a model's folder is given."""
    on_gpu = {
        "model": {"id": "tiny", "source": model},
        "replicas": {"count": 1, "accelerator": "gpu", "cpu_offload_bytes": 0},
        "engine": GPU_ENGINE,
    }
    return CaesuraConfig.model_validate({**CONFIG, **(on_gpu if model else {}), "http": {"port": 0}})


def deploy_plain(config: CaesuraConfig) -> str:
    """Put Ray's own application in the place of ours, with all of the engine's arguments; its URL's path."""
    from ray import serve as ray_serve
    from ray.serve.llm import build_openai_app

    from cluster.app import APPLICATION, llm_config_of

    llm_config = llm_config_of(config)
    environment = llm_config.runtime_env["env_vars"]
    llm_config.runtime_env = {"env_vars": {**environment, "RAYLLM_VLLM_ENGINE_CLS": "replicas.engine.ReplicaEngine"}}
    llm_config.engine_kwargs.pop("scheduler_cls")
    llm_config.engine_kwargs.pop("kv_transfer_config", None)
    llm_config.deployment_config.pop("request_router_config")
    ray_serve.delete(APPLICATION)
    ray_serve.run(build_openai_app({"llm_configs": [llm_config]}), name="plain", route_prefix="/plain")
    return "/plain"


def own_command(model: Path, port: int, *, on_gpu: bool) -> list[str]:
    """The command of vLLM's own server with the engine arguments that the subjects have."""
    on_cpu = {
        "kv-cache-memory-bytes": KV_BYTES,
        "block-size": 32,
        "distributed-executor-backend": "uni",  # with CPU_ENVIRONMENT: no process between engine and model, as in ours
    }
    arguments = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        **({} if on_gpu else on_cpu),
        **{name.replace("_", "-"): value for name, value in (GPU_ENGINE if on_gpu else ENGINE).items()},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-log-stats"]
    command += [] if on_gpu else ["--enforce-eager"]
    return command + [part for name, value in arguments.items() for part in (f"--{name}", str(value))]


@contextmanager
def own_server(model: Path, *, on_gpu: bool = False) -> Iterator[Subject]:
    """vLLM's own server with the same engine arguments.

    Raises:
        RuntimeError: it did not start.
    """
    (port,) = free_ports(1, "127.0.0.1")
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | ({} if on_gpu else CPU_ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"
    with foreign_server(own_command(model, port, on_gpu=on_gpu), url, environment) as pid:
        yield Subject(url, pid)


def compare(subjects: dict[str, Subject], streams: int, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each subject at one number of streams, with ratios to vLLM's own server."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    spent: dict[str, dict[str, float]] = {name: defaultdict(float) for name in subjects}
    for number in range(-1, rounds):  # the first one warms up
        for name in list(subjects) if number % 2 else list(reversed(subjects)):
            before = subjects[name].cpu_s()
            result = asyncio.run(measure(subjects[name].url, streams, tokens))
            after = subjects[name].cpu_s()
            if number >= 0:
                found[name].append(result)
                for role, seconds in after.items():
                    spent[name][role] += seconds - before.get(role, 0.0)
    thousands = rounds * streams * REQUESTS_EACH * tokens / 1000
    rows: list[dict[str, Any]] = []
    for name, results in found.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        cpu_s = {role: round(seconds / thousands, 4) for role, seconds in spent[name].items()}
        rows.append({"subject": name, "streams": streams, **medians, "cpu_s_per_1000_tokens": cpu_s})
    own = next(row for row in rows if row["subject"] == VLLM)
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / own["tokens_per_s"]
        row["ttft_ratio"] = row["ttft_s"] / own["ttft_s"]
    return rows


def draw_flames(subjects: Mapping[str, Subject], streams: int, tokens: int, directory: Path) -> None:
    """Write a flame graph of each role of each subject under load."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, subject in subjects.items():
        recorders = [
            subprocess.Popen(
                ["py-spy", "record", "--pid", str(process.pid), "--duration", str(int(FLAME_S)), "--rate", "100",
                 "--output", str(directory / f"{name}_{role}.svg")],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for role, process in subject.processes()
            if role in FLAMES
        ]  # fmt: skip
        give_up_s = time.monotonic() + 5 * FLAME_S
        while any(one.poll() is None for one in recorders) and time.monotonic() < give_up_s:
            asyncio.run(measure(subject.url, streams, tokens))
        for one in recorders:
            one.wait(STOP_WITHIN_S)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as a table of at most 80 columns."""
    table = Table("streams", "subject", "tok/s", "x vllm", "TTFT ms", "x vllm", "CPU s per 1,000 tokens")
    for row in rows:
        cpu_s = ", ".join(f"{role} {seconds:.3f}" for role, seconds in row["cpu_s_per_1000_tokens"].items())
        numbers = (f"{row['tokens_per_s']:.0f}", f"{row['ratio']:.2f}", f"{row['ttft_s'] * 1e3:.0f}")
        table.add_row(str(row["streams"]), row["subject"], *numbers, f"{row['ttft_ratio']:.2f}", cpu_s)
    Console(width=80).print(table)


def below_kept(ours: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Where a ratio is below that of the kept run by `FALL` or more: by the number of streams, both ratios."""
    kept = {row["streams"]: row["ratio"] for row in kept_rows("front_end") if row["subject"] == CAESURA}
    return {
        streams: (ratio, kept[streams])
        for streams, ratio in ours.items()
        if streams in kept and ratio <= kept[streams] * (1 - FALL)
    }


def main() -> int:
    """Measure, print, save; 1 if a target is missed, or a ratio has fallen below that of the kept run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--subjects", nargs="+", choices=tuple(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--flames", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--model", type=Path, default=None, help="the model's folder, with --accelerator gpu")
    parser.add_argument("--serve", choices=tuple(ENVIRONMENTS), default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        be(arguments.serve)
        return 0
    on_gpu = arguments.accelerator == "gpu"
    if on_gpu != (arguments.model is not None):
        parser.error("--model: a folder is needed with --accelerator gpu, and only there")
    if on_gpu:
        os.environ[MODEL_VARIABLE] = str(arguments.model)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        model = arguments.model or tiny_model_directory()
        subjects = {VLLM: stack.enter_context(own_server(model, on_gpu=on_gpu))}
        for name in arguments.subjects:
            subjects[name] = Subject(*stack.enter_context(serving("front_end", name)))
        for streams in arguments.streams:
            rows += compare(subjects, streams, arguments.rounds, arguments.tokens)
        if arguments.flames is not None:
            draw_flames(subjects, max(arguments.streams), arguments.tokens, arguments.flames)
    show(rows)
    ours = {row["streams"]: row["ratio"] for row in rows if row["subject"] == CAESURA}
    fallen = {} if on_gpu else below_kept(ours)
    for streams, (ratio, kept) in fallen.items():
        print(f"fallen: {ratio:.2f} x vLLM's own server at {streams} streams, the kept run had {kept:.2f} x")
    if fallen and arguments.out is None:
        return 1  # the kept run stays
    save("front_end", rows, arguments.out)
    missed = {streams: ratio for streams, ratio in ours.items() if ratio < TARGETS.get(streams, 0.0)}
    for streams, ratio in missed.items():
        print(f"missed: {ratio:.2f} x vLLM's own server at {streams} streams, the target is {TARGETS[streams]:.2f} x")
    return 1 if missed or fallen else 0


if __name__ == "__main__":
    sys.exit(main())
