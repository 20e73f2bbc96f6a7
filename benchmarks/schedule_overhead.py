"""What a step's `schedule()` costs through AgentScheduler, beside vLLM's own class, in one run.

    python -m benchmarks.schedule_overhead [--steps 50] [--rounds 16] [--policies vllm,mars] [--evictions]

256 turns run (decode, one token each a step) and 1,000 wait; under every policy that holds, 600 programs are held, of
which the next turns of 500 wait and 100 still wait for their tools. Every registered policy and stock take turns, a
round of steps each, so that drift of the machine cancels; CPU time is what counts. Programs are served on a clock of
20 ms a step, so that what ages with time does; SLO bounds of every kind apply, and half of the run goes by before all
that wait is late.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.results import save
from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.registry import POLICIES
from replicas.control import dispatch
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine, write_config_only_model

STOCK = "stock"
RUNNING, WAITING, PINNED, PAUSED = 256, 1000, 500, 100
SHORT_PAUSED = 4000
"""Programs that are held where memory is short."""
BLOCK, PROMPT, SHORT_PROMPT = 16, 1024, 60
"""Tokens of a block, of the prompt of a running turn, and of that of a held program."""
EARLY = 200
"""Of the running turns, those that came before the programs that are held: least waste holds only beside others."""
STEP_S = 0.02
WARMUP_STEPS = 20
PARAMETERS: dict[str, dict[str, Any]] = {
    # Its budget, the saturation point of the default cost model, is 203 tokens: 256 turns would never run.
    "infercept": {"saturation_budget": False},
}
BUDGETS = {"caesura": "vllm"}
"""Policies whose budget is another's: for the same reason, since its steps grow only for turns that can be in time."""
LIMITS = {"vllm": 1.10, "continuum": 1.30}
"""Times the stock class that a policy may cost in the mean."""
LIMIT = 1.5
"""For the others."""
EVICTIONS = "vllm,continuum,caesura"
"""Policies that are measured where memory is short."""
EVICTIONS_LIMIT = 2.0
"""For each of these: the 16 blocks of a step are those of four programs."""


@dataclass
class Subject:
    """A replica in that state, and what its steps took."""

    name: str
    engine: VirtualEngine
    clock: ManualClock = field(default_factory=ManualClock)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """One step, not timed."""
        self.clock.advance(STEP_S)
        self.engine.step()

    def time_steps(self, steps: int) -> None:
        """CPU seconds: the scheduler is one thread that waits for nothing, others may use the machine meanwhile. The
        model's part of a step is not timed.
        """
        schedule = self.engine.scheduler.schedule
        for _ in range(steps):
            self.clock.advance(STEP_S)
            start = time.thread_time()
            output = schedule()
            self.seconds.append(time.thread_time() - start)
            self.engine.complete(output)

    def held(self) -> int:
        """Programs that are held."""
        scheduler = self.engine.scheduler
        return len(scheduler.holds) if isinstance(scheduler, AgentScheduler) else 0


def subject_of(name: str, model: Path, steps: int, blocks: int) -> Subject:
    """A replica with nothing in it."""
    slo = SloConfig(ttft_s=steps * STEP_S / 2, tpot_s=0.2, e2e_s=1e6, normalized_latency_s=1.0)
    policy = PolicyConfig(
        name="vllm" if name == STOCK else name, parameters=PARAMETERS.get(name, {}), budget=BUDGETS.get(name)
    )
    shape = Shape(num_blocks=blocks, max_num_seqs=RUNNING, max_num_batched_tokens=8192, max_model_len=32768)
    scheduler_cls = AsyncScheduler if name == STOCK else AgentScheduler
    subject = Subject(name, VirtualEngine(scheduler_cls, model, shape, SchedulerSettings(policy=policy, slo=slo)))
    if isinstance(scheduler := subject.engine.scheduler, AgentScheduler):
        scheduler.clock = subject.clock
    return subject


def run_turns(subject: Subject, first: int, last: int) -> None:
    """Let turns begin that outlast the measurement."""
    for i in range(first, last):
        subject.engine.submit(f"run{i}", [i + 1000] * PROMPT, 20_000, _program(f"r{i}"))
    counts = subject.engine.scheduler.get_request_counts
    while counts()[0] < last or counts()[1]:
        subject.step()


def hold_programs(subject: Subject, programs: int) -> None:
    """Let programs have their first turns, and hold them through the side channel: none ends within the run."""
    engine, scheduler = subject.engine, subject.engine.scheduler
    running = scheduler.get_num_unfinished_requests()
    for i in range(programs):
        engine.submit(f"first{i}", [i + 100] * SHORT_PROMPT, 1, _program(f"w{i}"))
    while scheduler.get_num_unfinished_requests() > running:
        subject.step()
    if isinstance(scheduler, AgentScheduler):
        for held in list(scheduler.holds):
            dispatch(scheduler, "hold", {"key": held.key, "seconds": 250.0})


def loaded(name: str, model: Path, steps: int) -> Subject:
    """A replica whose turns run on for ``steps``, and whose memory has no room for all that waits."""
    subject = subject_of(name, model, steps, RUNNING * (1100 + steps) // BLOCK + 4000)
    engine, scheduler = subject.engine, subject.engine.scheduler
    run_turns(subject, 0, EARLY)
    hold_programs(subject, PINNED + PAUSED)
    run_turns(subject, EARLY, RUNNING)
    for i in range(WAITING):
        at = i if i < PINNED else i + PAUSED
        engine.submit(f"wait{i}", [at + 100] * 60, 8, _program(f"w{at}"))
    for _ in range(WARMUP_STEPS):
        subject.step()
    assert scheduler.get_request_counts() == (RUNNING, WAITING)
    return subject


def short_of_memory(name: str, model: Path, steps: int) -> Subject:
    """A replica whose turns grow into the memory of programs that are held, or in vLLM's class cached."""
    held = SHORT_PAUSED * -(-SHORT_PROMPT // BLOCK)
    subject = subject_of(name, model, steps, held + RUNNING * (PROMPT // BLOCK + 1))
    hold_programs(subject, SHORT_PAUSED)
    run_turns(subject, 0, RUNNING)
    for _ in range(WARMUP_STEPS):
        subject.step()
    assert subject.engine.scheduler.get_request_counts() == (RUNNING, 0)
    return subject


def _program(name: str) -> ProgramIdentity:
    hints = Hints(expected_tool="ls", expected_pause_s=0.01, retention_s=250.0)
    return ProgramIdentity(program_id=name, hints=hints)


def rows_of(subjects: list[Subject]) -> Iterator[dict[str, Any]]:
    """One for each, stock first."""
    stock_mean, stock_p99 = _summary(subjects[0].seconds)
    for subject in subjects:
        mean, p99 = _summary(subject.seconds)
        yield {
            "policy": subject.name,
            "parameters": PARAMETERS.get(subject.name, {}),
            "held": subject.held(),
            "mean_us": round(mean * 1e6, 1),
            "p99_us": round(p99 * 1e6, 1),
            "mean_ratio": round(mean / stock_mean, 3),
            "p99_ratio": round(p99 / stock_p99, 3),
        }


def _summary(seconds: list[float]) -> tuple[float, float]:
    return statistics.fmean(seconds), statistics.quantiles(seconds, n=100)[98]


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of a round")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--policies", default=None, help="default: all, or those that --evictions measures")
    parser.add_argument("--evictions", action="store_true", help="with memory that is short, and nothing that waits")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)

    steps = arguments.steps * arguments.rounds
    policies = (arguments.policies or (EVICTIONS if arguments.evictions else ",".join(POLICIES))).split(",")
    with TemporaryDirectory() as directory:
        model = write_config_only_model(Path(directory), max_model_len=32768)
        make = short_of_memory if arguments.evictions else loaded
        subjects = [make(name, model, steps) for name in (STOCK, *policies)]
    gc.collect()
    gc.disable()
    for turn in range(arguments.rounds):
        for subject in subjects if turn % 2 == 0 else reversed(subjects):
            subject.time_steps(arguments.steps)
    gc.enable()

    rows = list(rows_of(subjects))
    beside = f"{SHORT_PAUSED} held programs" if arguments.evictions else f"{WAITING} waiting turns"
    print(f"schedule() at {RUNNING} running turns and {beside}, {arguments.rounds} x {arguments.steps} steps")
    for row in rows:
        print(
            f"  {row['policy']:10} {row['held']:4} held   mean {row['mean_us']:7.1f} us  {row['mean_ratio']:.3f} x   "
            f"p99 {row['p99_us']:8.1f} us  {row['p99_ratio']:.3f} x   {row['parameters'] or ''}"
        )
    save("schedule_evictions" if arguments.evictions else "schedule_overhead", rows, arguments.json)
    limits = dict.fromkeys(policies, EVICTIONS_LIMIT) if arguments.evictions else LIMITS
    missed = [row for row in rows if row["mean_ratio"] > limits.get(row["policy"], LIMIT)]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
