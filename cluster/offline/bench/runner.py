"""Replays programs against a server in an open loop, with alternating blocks of all policies.

The policies alternate so that drift of the machine cancels out. Each program is a task of turns and tool pauses.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

import numpy as np

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.slo import Outcome, ProgramRecord, TurnRecord
from cluster.offline.bench.client import Turn, TurnClient, open_session
from cluster.offline.bench.results import BenchResult, BlockResult
from cluster.offline.bench.server import Server, watched, with_waits
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Conversation, PlannedProgram, draw


@dataclass(frozen=True, slots=True)
class Job:
    """A program with its id in requests, its arrival in seconds from the start, and the seed of its token ids."""

    program_id: str
    program: PlannedProgram
    arrival_s: float
    seed: tuple[int, ...]


@dataclass(slots=True)
class _Replay:
    """A job that is running."""

    job: Job
    arrival_s: float
    done: list[TurnRecord] = field(default_factory=list)
    under_way: Turn | None = None

    def record(self, now_s: float) -> ProgramRecord:
        """Make the record of the program at ``now_s``. A running turn counts as unfinished."""
        turns = list(self.done)
        if self.under_way is not None:
            turns.append(self.under_way.record(Outcome.UNFINISHED))
        planned = len(self.job.program.turns)
        outcome = turns[-1].outcome if turns else Outcome.UNFINISHED
        if outcome is Outcome.OK and len(turns) < planned:
            outcome = Outcome.UNFINISHED
        return ProgramRecord(
            program_id=self.job.program_id,
            arrival_s=self.arrival_s,
            outcome=outcome,
            turns=tuple(turns),
            planned_turns=planned,
            kind=self.job.program.kind,
            until_s=now_s,
        )


async def replay(
    jobs: Sequence[Job], client: TurnClient, clock: Clock, drain_s: float, ended: Callable[[ProgramRecord], None]
) -> list[ProgramRecord]:
    """Run all ``jobs``, and return one record for each job, in order. Times are on ``clock``.

    Programs that have not ended ``drain_s`` seconds after the last arrival are cancelled and count as unfinished.
    ``ended`` is called with each program when it ends.
    """
    start_s = clock.now_s()
    replays = [_Replay(job, start_s + job.arrival_s) for job in jobs]
    tasks = [asyncio.create_task(_run(replay, client, clock, ended)) for replay in replays]
    deadline_s = start_s + max((job.arrival_s for job in jobs), default=0.0) + drain_s
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - clock.now_s()))
    finally:
        cut = [replay for replay, task in zip(replays, tasks, strict=True) if task.cancel()]
        failures = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in failures:
        if isinstance(failure, BaseException) and not isinstance(failure, asyncio.CancelledError):
            raise failure
    over_s = clock.now_s()
    for replay in cut:
        ended(replay.record(over_s))
    return [replay.record(over_s) for replay in replays]


async def _run(replay: _Replay, client: TurnClient, clock: Clock, ended: Callable[[ProgramRecord], None]) -> None:
    program = replay.job.program
    conversation = Conversation(program, replay.job.seed)
    due_s = replay.arrival_s
    last_tool: str | None = None
    for index, planned in enumerate(program.turns):
        await asyncio.sleep(max(0.0, due_s - clock.now_s()))
        prompt, known = conversation.prompt(planned)
        replay.under_way = Turn(
            program_id=replay.job.program_id,
            index=index,
            intended_start_s=due_s,
            prompt=prompt,
            output_tokens=planned.output_tokens,
            previous_context_tokens=known,
            tool=planned.tool,
            last_tool=last_tool,
            is_last=index == len(program.turns) - 1,
        )
        record = await client.run(replay.under_way)
        replay.done.append(record)
        generated, replay.under_way = replay.under_way.generated, None
        if record.outcome is not Outcome.OK or record.last_token_s is None:
            break
        conversation.answered(generated, planned.kept_tokens)
        due_s = record.last_token_s + planned.pause_s
        last_tool = planned.tool
    ended(replay.record(clock.now_s()))


class BenchProgress(Protocol):
    """Receives the progress of a run."""

    def block(self, policy: str, block: int, programs: int) -> None:
        """Called when a block of ``programs`` programs begins under ``policy``. ``block`` counts from 0."""
        ...

    def ended(self, program: ProgramRecord) -> None:
        """Called when a program of the block has ended, with any outcome."""
        ...


class Silent:
    """Shows no progress."""

    def block(self, policy: str, block: int, programs: int) -> None:
        """See BenchProgress."""

    def ended(self, program: ProgramRecord) -> None:
        """See BenchProgress."""


def policy_order(policies: tuple[str, ...], block: int) -> tuple[str, ...]:
    """Return the order of the policies in a block. It rotates, so that no policy is always first."""
    first = block % len(policies)
    return policies[first:] + policies[:first]


def plan_block(pool: tuple[PlannedProgram, ...], settings: BenchSettings, block: int) -> list[Job]:
    """Return the jobs of ``block``, which are the same for each policy and run. Their ids need a unique prefix."""
    seed = (settings.seed, block)
    rng = np.random.default_rng(seed)
    times_s = settings.process.times_s(rng, count=settings.count, duration_s=settings.duration_s)
    programs = draw(pool, len(times_s), rng)
    return [
        Job(program_id=f"{number:05d}", program=program, arrival_s=time_s, seed=(*seed, number))
        for number, (program, time_s) in enumerate(zip(programs, times_s, strict=True))
    ]


async def run_bench(settings: BenchSettings, progress: BenchProgress, clock: Clock | None = None) -> BenchResult:
    """Replay the workload against the server of ``settings`` and record every program.

    Raises:
        ConfigError: the server cannot be reached, or cannot switch to a policy.
        TraceError: the trace file cannot be used.
    """
    clock = clock or MonotonicClock()
    workload = settings.load()
    url = settings.url.rstrip("/")
    run_id = uuid4().hex[:8]
    results: list[BlockResult] = []
    async with open_session() as session:
        server = Server(session, url)
        model = await server.first_model() if settings.model is None else settings.model
        client = TurnClient(session, url, model, clock, settings.turn_timeout_s)
        for block in range(settings.blocks):
            planned = plan_block(workload.programs, settings, block)
            for policy in policy_order(settings.policy_names, block):
                if settings.policies:
                    await server.switch_policy(policy)
                    await server.reset()
                jobs = [replace(job, program_id=f"{run_id}-{policy}-{block}-{job.program_id}") for job in planned]
                progress.block(policy, block, len(jobs))
                async with watched(server, clock, on=settings.record) as memory:
                    records = await replay(jobs, client, clock, settings.drain_s, progress.ended)
                histories = await server.histories(records)
                records = [with_waits(record, histories.get(record.program_id)) for record in records]
                found = _split(policy, block, records, jobs, settings.warmup_s)
                results.append(replace(found, histories=histories, memory=tuple(memory)))
        versions = await server.versions()
    return BenchResult(settings, model, workload, tuple(results), versions)


def _split(policy: str, block: int, records: list[ProgramRecord], jobs: list[Job], warmup_s: float) -> BlockResult:
    pairs = list(zip(records, jobs, strict=True))
    return BlockResult(
        policy=policy,
        block=block,
        warmup=tuple(record for record, job in pairs if job.arrival_s < warmup_s),
        measured=tuple(record for record, job in pairs if job.arrival_s >= warmup_s),
        start_s=pairs[0][0].arrival_s - pairs[0][1].arrival_s if pairs else 0.0,
    )
