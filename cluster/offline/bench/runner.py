"""Replays programs against a server in an open loop, with alternating blocks of all policies.

The policies alternate so that drift of the machine cancels out. Each program is a task of turns and tool pauses.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import ConfigError
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


def children_of(job: Job, turn: int, now_s: float) -> list[Job]:
    """Return the jobs of the programs that run in the pause after a turn of ``job``. Their ids contain that of the job.

    Args:
        job: the parent.
        turn: index of its turn.
        now_s: their arrival.
    """
    return [
        Job(f"{job.program_id}.{turn}.{number}", child, now_s, (*job.seed, turn, number))
        for number, child in enumerate(job.program.turns[turn].children)
    ]


@dataclass(slots=True)
class _Replay:
    """A job that is running."""

    job: Job
    arrival_s: float
    parent_id: str | None = None
    done: list[TurnRecord] = field(default_factory=list)
    under_way: Turn | None = None
    over: bool = False

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
    """Run all ``jobs``, and return one record for each job, in order, and then those of the children that began.

    Times are on ``clock``. Programs that have not ended ``drain_s`` seconds after the last arrival are cancelled and
    count as unfinished. What did not complete counts up to that time, also where all had ended earlier. ``ended`` is
    called with each program when it ends.
    """
    start_s = clock.now_s()
    replays = [_Replay(job, start_s + job.arrival_s) for job in jobs]
    begun: list[_Replay] = []
    tasks = [asyncio.create_task(_run(replay, client, clock, ended, begun)) for replay in replays]
    deadline_s = start_s + max((job.arrival_s for job in jobs), default=0.0) + drain_s
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline_s - clock.now_s()))
    finally:
        for task in tasks:
            task.cancel()
        failures = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in failures:
        if isinstance(failure, BaseException) and not isinstance(failure, asyncio.CancelledError):
            raise failure
    for replay in (*replays, *begun):
        if not replay.over:
            ended(replay.record(deadline_s))
    # What was refused counts up to the same time under every policy, although one with less left to do ends earlier.
    return [replay.record(deadline_s) for replay in (*replays, *begun)]


async def _run(
    replay: _Replay,
    client: TurnClient,
    clock: Clock,
    ended: Callable[[ProgramRecord], None],
    begun: list[_Replay],
) -> None:
    """Run a program, and its children in its pauses. ``begun`` gets each child that begins."""
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
            parent_id=replay.parent_id,
        )
        record = await client.run(replay.under_way)
        replay.done.append(record)
        generated, replay.under_way = replay.under_way.generated, None
        if record.outcome is not Outcome.OK or record.last_token_s is None:
            break
        conversation.answered(generated, planned.kept_tokens)
        due_s = record.last_token_s + planned.pause_s
        last_tool = planned.tool
        if planned.children:
            jobs = children_of(replay.job, index, record.last_token_s)
            children = [_Replay(job, job.arrival_s, replay.job.program_id) for job in jobs]
            begun += children
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(_run(child, client, clock, ended, begun))
            due_s = clock.now_s()
    replay.over = True
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
    """The progress of a run whose output is read by a program: it prints nothing."""

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

    A server whose policy was switched has its own again at the end.

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
        before = await server.policy() if settings.policies else None
        try:
            for block in range(settings.blocks):
                planned = plan_block(workload.programs, settings, block)
                for policy in policy_order(settings.policy_names, block):
                    if settings.policies:
                        await server.switch_policy({"name": policy})
                        await server.reset()
                    jobs = [replace(job, program_id=f"{run_id}-{policy}-{block}-{job.program_id}") for job in planned]
                    progress.block(policy, block, len(jobs))
                    async with watched(server, clock, on=settings.record) as memory:
                        records = await replay(jobs, client, clock, settings.drain_s, progress.ended)
                    histories = await server.histories(records)
                    records = [with_waits(record, histories.get(record.program_id)) for record in records]
                    found = _split(policy, block, records, jobs, settings.warmup_s)
                    results.append(replace(found, histories=histories, memory=tuple(memory)))
        finally:
            notes = () if before is None else await _set_back(server, before)
        versions = await server.versions()
    workload = replace(workload, notes=(*workload.notes, *notes))
    return BenchResult(settings, model, workload, tuple(results), versions)


async def _set_back(server: Server, policy: Mapping[str, Any]) -> tuple[str, ...]:
    """Switch to the policy that the server had before. Return a note if it has failed: what was measured stays."""
    try:
        await server.switch_policy(policy)
    except ConfigError as error:
        return (f"the server's policy is not what it was ({error})",)
    return ()


def _split(policy: str, block: int, records: list[ProgramRecord], jobs: list[Job], warmup_s: float) -> BlockResult:
    start_s = records[0].arrival_s - jobs[0].arrival_s if jobs else 0.0
    arrivals_s = [job.arrival_s for job in jobs] + [record.arrival_s - start_s for record in records[len(jobs) :]]
    pairs = list(zip(records, arrivals_s, strict=True))
    return BlockResult(
        policy=policy,
        block=block,
        warmup=tuple(record for record, arrival_s in pairs if arrival_s < warmup_s),
        measured=tuple(record for record, arrival_s in pairs if arrival_s >= warmup_s),
        start_s=start_s,
    )
