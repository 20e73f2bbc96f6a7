"""Replays programs against a server: an open loop of arrivals, each program a task of turns and tool pauses."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.bench.client import Turn, TurnClient
from cluster.bench.conversation import Conversation
from cluster.bench.workload import PlannedProgram
from cluster.clock import Clock
from cluster.goodput import Outcome, ProgramRecord, TurnRecord


@dataclass(frozen=True, slots=True)
class Job:
    """A program with the id that it has on the wire, its arrival (seconds from the start) and its random ids' seed."""

    program_id: str
    program: PlannedProgram
    arrival_s: float
    seed: tuple[int, ...]


@dataclass(slots=True)
class _Replay:
    """One job under way."""

    job: Job
    arrival_s: float
    done: list[TurnRecord] = field(default_factory=list)
    under_way: Turn | None = None

    def record(self) -> ProgramRecord:
        """The program as it stands; a turn under way is an unfinished one."""
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
        )


async def replay(
    jobs: Sequence[Job], client: TurnClient, clock: Clock, drain_s: float, ended: Callable[[ProgramRecord], None]
) -> list[ProgramRecord]:
    """Run all ``jobs``; what has not ended ``drain_s`` after the last arrival is cut off as unfinished.

    ``ended`` is told of each program when it ends. One record for each job, in order; times are ``clock``'s.
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
    for replay in cut:
        ended(replay.record())
    return [replay.record() for replay in replays]


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
    ended(replay.record())
