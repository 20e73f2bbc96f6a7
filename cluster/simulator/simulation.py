"""Programs on virtual replicas: an open loop of arrivals, turns and tool pauses, on one virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.bench.conversation import Conversation
from cluster.bench.replay import Job
from cluster.clock import ManualClock
from cluster.goodput import Outcome, ProgramRecord, TurnRecord
from cluster.program import ProgramIdentity
from cluster.simulator.foresight import Foresight
from cluster.simulator.placement import place
from cluster.simulator.timeline import Timeline
from replicas.virtual_replica import VirtualReplica, VirtualTurn


@dataclass(slots=True)
class _Program:
    """One job under way."""

    job: Job
    conversation: Conversation
    identities: list[ProgramIdentity]
    replica: int
    due_s: float
    known_tokens: int = 0
    done: list[TurnRecord] = field(default_factory=list)
    under_way: VirtualTurn | None = None

    def turn_record(self, outcome: Outcome) -> TurnRecord:
        """Of the turn under way."""
        turn = self.under_way
        assert turn is not None, f"{self.job.program_id} has no turn under way"
        return TurnRecord(
            program_id=self.job.program_id,
            index=len(self.done),
            intended_start_s=self.due_s,
            outcome=outcome,
            first_token_s=turn.first_token_s,
            last_token_s=turn.last_token_s,
            prompt_tokens=turn.request.num_prompt_tokens,
            output_tokens=turn.request.num_output_tokens,
            previous_context_tokens=self.known_tokens,
            cached_tokens=turn.cached_tokens,
            fetched_tokens=turn.fetched_tokens,
            queue_s=None if turn.admitted_s is None else turn.admitted_s - turn.submitted_s,
        )


class Simulation:
    """Runs ``jobs`` on ``replicas``, which share ``clock``. Use it once."""

    def __init__(
        self, jobs: Sequence[Job], replicas: Sequence[VirtualReplica], clock: ManualClock, foresight: Foresight
    ) -> None:
        self.timeline = Timeline(clock, self._begin_steps)
        self._jobs = jobs
        self._replicas = replicas
        self._clock = clock
        self._foresight = foresight
        self._live = [0] * len(replicas)
        self._steps = [0] * len(replicas)
        """Begun on each replica."""
        self._programs: dict[str, _Program] = {}
        self._by_request: dict[str, _Program] = {}
        for job in jobs:
            self.timeline.at(clock.now_s() + job.arrival_s, partial(self._arrive, job))

    def run(self, until_s: float) -> list[ProgramRecord]:
        """Simulate up to ``until_s`` on the clock, or until all programs have ended; one record a job, in order.

        Raises:
            IntegrityError: a replica's blocks do not add up in the end.
        """
        self.timeline.run(until_s)
        for replica in self._replicas:
            replica.check_integrity()
        return [self._record(job) for job in self._jobs]

    def _arrive(self, job: Job) -> None:
        index = place(self._live)
        self._live[index] += 1
        program = self._programs[job.program_id] = _Program(
            job=job,
            conversation=Conversation(job.program, job.seed),
            identities=self._foresight.identities(job.program_id, job.program, job.seed),
            replica=index,
            due_s=self._clock.now_s(),
        )
        self._send(program)

    def _send(self, program: _Program) -> None:
        """The program's next turn is due now: it is on its way to the replica."""
        way_s = self._replicas[program.replica].cost.turn_s
        if way_s:
            self.timeline.at(self._clock.now_s() + way_s, partial(self._submit, program))
        else:
            self._submit(program)

    def _submit(self, program: _Program) -> None:
        """The program's next turn has come to its replica."""
        index = len(program.done)
        planned = program.job.program.turns[index]
        prompt, program.known_tokens = program.conversation.prompt(planned)
        request_id = f"{program.job.program_id}.{index}"
        program.under_way = self._replicas[program.replica].submit(
            request_id, prompt, planned.output_tokens, program.identities[index], program.known_tokens
        )
        self._by_request[request_id] = program

    def _begin_steps(self) -> None:
        for index, replica in enumerate(self._replicas):
            if replica.interrupted:
                self._end_step(index, self._steps[index])
            if replica.busy:
                continue
            seconds = replica.begin_step()
            if seconds is not None:
                self._steps[index] += 1
                self.timeline.at(self._clock.now_s() + seconds, partial(self._end_step, index, self._steps[index]))

    def _end_step(self, index: int, step: int) -> None:
        """The ``step``-th step of a replica ends, unless a turn that arrived has ended it before."""
        if step != self._steps[index] or not self._replicas[index].busy:
            return
        for turn in self._replicas[index].end_step():
            self._turn_ended(self._by_request.pop(turn.request.request_id), turn)

    def _turn_ended(self, program: _Program, turn: VirtualTurn) -> None:
        planned = program.job.program.turns[len(program.done)]
        program.done.append(program.turn_record(Outcome.OK))
        program.under_way = None
        if len(program.done) == len(program.job.program.turns):
            self._live[program.replica] -= 1
            return
        program.conversation.answered(turn.generated, planned.kept_tokens)
        program.due_s = self._clock.now_s() + planned.pause_s
        self.timeline.at(program.due_s, partial(self._send, program))

    def _record(self, job: Job) -> ProgramRecord:
        """The program as it stands; a turn under way is an unfinished one."""
        program = self._programs.get(job.program_id)
        turns = list(program.done) if program else []
        if program is not None and program.under_way is not None:
            turns.append(program.turn_record(Outcome.UNFINISHED))
        planned = len(job.program.turns)
        finished = sum(turn.outcome is Outcome.OK for turn in turns) == planned
        return ProgramRecord(
            program_id=job.program_id,
            arrival_s=job.arrival_s,
            outcome=Outcome.OK if finished else Outcome.UNFINISHED,
            turns=tuple(turns),
            planned_turns=planned,
            kind=job.program.kind,
        )
