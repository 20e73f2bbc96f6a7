"""What a step's `schedule()` costs through AgentScheduler, beside vLLM's own class, in one run.

    python -m benchmarks.schedule_overhead [--steps 300] [--rounds 8]

256 turns run (decode, one token each a step) and 1,000 wait. The classes take turns, a round each, so that drift of
the machine cancels; the ratio is that of the medians over all steps. Under `continuum` half of the waiting programs are
pinned.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.results import save
from cluster.config import PolicyConfig
from cluster.program import Hints, ProgramIdentity
from cluster.tiny.model import tiny_model_directory
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine

RUNNING, WAITING, PINNED = 256, 1000, 500
LIMITS = {"vllm": 1.10, "continuum": 1.30}
"""Times the stock class that a policy may cost."""


def loaded(policy: str | None) -> VirtualEngine:
    """A replica in that state; policy None is vLLM's own class."""
    settings = SchedulerSettings(policy=PolicyConfig(name=policy or "vllm"))
    scheduler_cls = AsyncScheduler if policy is None else AgentScheduler
    # A model length that a decode never reaches; memory for all that runs and all that is pinned.
    shape = Shape(num_blocks=60_000, max_num_seqs=RUNNING, max_num_batched_tokens=8192, max_model_len=32768)
    engine = VirtualEngine(scheduler_cls, tiny_model_directory(), shape, settings)
    for i in range(PINNED):
        engine.submit(f"first{i}", [i + 100] * 40, 1, _program(f"w{i}"))
    engine.run()
    for i in range(RUNNING):
        engine.submit(f"run{i}", [i + 1000] * 64, 20_000, _program(f"r{i}"))
    while engine.scheduler.get_request_counts()[0] < RUNNING:
        engine.step()
    for i in range(WAITING):
        engine.submit(f"wait{i}", [i + 100] * 60, 8, _program(f"w{i}"))
    for _ in range(20):
        engine.step()
    assert engine.scheduler.get_request_counts() == (RUNNING, WAITING)
    return engine


def _program(name: str) -> ProgramIdentity:
    return ProgramIdentity(program_id=name, hints=Hints(expected_tool="ls", retention_s=500.0))


def time_steps(engine: VirtualEngine, steps: int) -> Iterable[float]:
    """Seconds of each `schedule()`; the model's part of a step is not timed."""
    schedule = engine.scheduler.schedule
    for _ in range(steps):
        start = time.perf_counter()
        output = schedule()
        yield time.perf_counter() - start
        engine.complete(output)


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)

    names: list[str | None] = [None, *LIMITS]
    engines = {name: loaded(name) for name in names}
    times: dict[str | None, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for turn in range(arguments.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            times[name].extend(time_steps(engines[name], arguments.steps))
    gc.enable()

    stock = statistics.median(times[None])
    rows = [
        {"policy": name or "stock", "median_ms": statistics.median(t) * 1e3, "ratio": statistics.median(t) / stock}
        for name, t in times.items()
    ]
    print(f"schedule() at {RUNNING} running and {WAITING} waiting turns, {arguments.rounds} x {arguments.steps} steps")
    for row in rows:
        print(f"  {row['policy']:10} median {row['median_ms']:.3f} ms   {row['ratio']:.3f} x stock")
    save("schedule_overhead", rows, arguments.json)
    missed = [name for name, limit in LIMITS.items() if statistics.median(times[name]) > limit * stock]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
