"""What the disk tier saves: the first token of a program whose replica was killed, loaded from disk or computed again.

    python -m benchmarks.kv_tiers [--programs 5] [--tokens 3500]

Programs of 3,500 tokens pause on a replica's engine, which writes their KV to disk. The engine's process is killed with
SIGKILL. Another engine starts on the same folder, beside one without a disk tier. Each program's next turn runs on
both, and must generate the same tokens. It is measured with the built-in model, and with a random model that computes
3,500 tokens in about a second. The time from the start of the new engine's first turn until its first chunk was
loaded is measured, too.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The environment of engines is set by benchmarks.pause_work before vLLM is imported.
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.pause_work import BLOCK, LARGER, Served, measured_cost, numbers, start_engine, turn
from benchmarks.results import save
from cluster.config.models import DiskTierConfig
from replicas.cost_model import CostModel
from replicas.host_tier import kv_transfer_config
from replicas.tiny.model import tiny_model_directory

MOST_OF_TTFT, MOST_TO_FIRST_HIT_S = 0.3, 1.0
"""The bounds that are to be reached."""
HOST_BYTES, DISK_BYTES = 400 << 20, 4 << 30
RETURNED = 32
"""Tokens that a tool returns."""
WRITTEN_WITHIN_S = 60.0


def start_tiers(model: Path, cost: CostModel, disk: Path | None) -> AsyncLLM:
    """Start a replica's engine. It has both tiers, or none."""
    tiers = None
    if disk is not None:
        below = DiskTierConfig(path=str(disk), bytes=DISK_BYTES)
        tiers = kv_transfer_config(HOST_BYTES, replicas_here=2, disk=below)
    return start_engine(model, cost, "vllm", tiers)


def kill(engine: AsyncLLM) -> None:
    """Kill an engine's process, as a failure would."""
    for process in engine.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    engine.shutdown()


def prompt_of(number: int, tokens: int) -> list[int]:
    """Return a program's first prompt."""
    return [100 + (place * 7 + number * 13 + place // 97) % 900 for place in range(tokens)]


async def write_programs(engine: AsyncLLM, programs: int, tokens: int) -> list[list[int]]:
    """Run the first turn of programs, and wait until their KV is on disk. Return their contexts."""
    contexts = []
    await turn(engine, "warm", prompt_of(99, tokens), 4, last=True)
    for number in range(programs):
        prompt = prompt_of(number, tokens)
        contexts.append(prompt + (await turn(engine, f"p{number}", prompt, 4)).tokens)
        wanted = (number + 1) * (tokens // BLOCK) * BLOCK
        deadline_s = time.perf_counter() + WRITTEN_WITHIN_S
        while (now := await numbers(engine))["disk_used_tokens"] < wanted:
            if time.perf_counter() > deadline_s or not now["disk_writes"]["written"]:
                break
            await asyncio.sleep(0.05)
    return contexts


async def first_hit_s(engine: AsyncLLM, context: list[int], served_from_s: float) -> float:
    """Run a program's next turn on an engine that has just started. Return the seconds until its KV was loaded."""
    served = asyncio.create_task(turn(engine, "first", [*context, 7], 4))
    while not (await numbers(engine))["context_tokens"]["disk"]:
        if served.done():
            return float("nan")
        await asyncio.sleep(0.005)
    hit_s = time.perf_counter() - served_from_s
    await served
    return hit_s


async def part(name: str, model: Path, programs: int, tokens: int) -> dict[str, Any]:
    """Compare both engines with one model."""
    cost = await measured_cost(model)
    row: dict[str, Any] = {"model": name, "tokens": tokens, "prompt_token_ms": cost.token_s * 1e3}
    found: dict[str, list[Served]] = {"loaded": [], "computed": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd() / ".cache") as folder:
        engine = start_tiers(model, cost, Path(folder))
        contexts = await write_programs(engine, programs + 1, tokens)
        row["written"] = {key: value for key, value in (await numbers(engine)).items() if key.startswith("disk_")}
        kill(engine)
        engines = {"computed": start_tiers(model, cost, None), "loaded": start_tiers(model, cost, Path(folder))}
        try:
            row["first_hit_s"] = await first_hit_s(engines["loaded"], contexts.pop(), time.perf_counter())
            await turn(engines["computed"], "warm", prompt_of(98, tokens), 4, last=True)
            for number, context in enumerate(contexts):
                prompt = [*context, *prompt_of(50 + number, RETURNED)]
                for kind in ("loaded", "computed") if number % 2 else ("computed", "loaded"):
                    found[kind].append(await turn(engines[kind], f"p{number}", prompt, 4, last=True))
                assert found["loaded"][-1].tokens == found["computed"][-1].tokens, "the tokens differ"
            after = await numbers(engines["loaded"])
        finally:
            for one in engines.values():
                one.shutdown()
    row["ttft_ms"] = {kind: statistics.median(one.ttft_s for one in turns) * 1e3 for kind, turns in found.items()}
    row["ratio"] = row["ttft_ms"]["loaded"] / row["ttft_ms"]["computed"]
    row["context_tokens"] = after["context_tokens"]
    row["disk_bytes"], row["disk_seconds"] = after["disk_bytes"], after["disk_seconds"]
    row["disk_troubles"] = {trouble: count for trouble, count in after["disk_troubles"].items() if count}
    return row


async def measure(programs: int, tokens: int, names: list[str], path: Path | None) -> int:
    """Run, print, save; exit status 1 where a bound is missed with the random model."""
    rows = []
    (Path.cwd() / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LARGER))
        models = {"random": Path(directory), "built-in": tiny_model_directory()}
        for name in names:
            rows.append(await part(name, models[name], programs, tokens))
            print(json.dumps(rows[-1], indent=1), flush=True)
    save("kv_tiers", rows, path)
    first = replace_nan(rows[0]["first_hit_s"])
    reached = {
        "ttft": rows[0]["ratio"] <= MOST_OF_TTFT,
        "first hit": first is not None and first <= MOST_TO_FIRST_HIT_S,
    }
    for bound, kept in reached.items():
        print(f"{bound}: {'reached' if kept else 'MISSED'}")
    return 0 if all(reached.values()) else 1


def replace_nan(value: float) -> float | None:
    """Return a number, or None if it is none."""
    return None if value != value else value


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--models", nargs="+", choices=("random", "built-in"), default=["random", "built-in"])
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    return asyncio.run(measure(arguments.programs, arguments.tokens, arguments.models, arguments.json))


if __name__ == "__main__":
    sys.exit(main())
