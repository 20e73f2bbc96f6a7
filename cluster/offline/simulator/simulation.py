"""Simulates programs on virtual replicas: arrivals, turns, routing and tool pauses on one virtual clock."""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite

from cluster.core.clock import ManualClock
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome, ProgramRecord, TurnRecord
from cluster.offline.bench.runner import Job, children_of
from cluster.offline.bench.workload import Conversation
from cluster.offline.simulator.disaggregated import PREFIX, PrefillPool
from cluster.offline.simulator.foresight import Foresight
from cluster.offline.simulator.routed import InfiniteCache, RoutedTurn
from cluster.offline.simulator.routing import Answer, Sent, SimulatedTurn, TurnedAway, TurnRouter
from replicas.cost_model import CostModel
from replicas.virtual_replica import VirtualReplica, VirtualTurn


class Timeline:
    """A queue of events on one clock. Events at the same time run in the order in which they were scheduled.

    Args:
        clock: advanced to the time of each event before it runs.
        settled: called after all events of one time.
    """

    def __init__(self, clock: ManualClock, settled: Callable[[], None]) -> None:
        self._clock = clock
        self._settled = settled
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        """Schedule ``event`` at ``at_s``.

        Raises:
            ValueError: ``at_s`` is in the past.
        """
        if at_s < self._clock.now_s():
            raise ValueError(f"an event at {at_s}, but it is {self._clock.now_s()}")
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def run(self, until_s: float) -> None:
        """Run all events up to and including ``until_s``. Return earlier if no event is left."""
        events = self._events
        while events and events[0][0] <= until_s:
            now_s = events[0][0]
            self._clock.move_to(now_s)
            while events and events[0][0] == now_s:
                heapq.heappop(events)[2]()
            self._settled()


@dataclass(slots=True)
class _Program:
    """A job that is running."""

    job: Job
    conversation: Conversation
    identities: list[ProgramIdentity]
    arrival_s: float
    due_s: float
    known_tokens: int = 0
    done: list[TurnRecord] = field(default_factory=list)
    turn: SimulatedTurn | None = None
    """The turn that is due: it waits at the router, is being sent, or runs."""
    under_way: VirtualTurn | None = None
    """The same turn on its replica; None until it is there."""
    prefill: VirtualTurn | None = None
    """The turn's prompt on a prefill replica; None: its own replica computes it."""
    parent: "_Program | None" = None
    children: int = 0
    """Number of programs whose end the pause waits for."""

    def turn_record(self, outcome: Outcome, cost: CostModel) -> TurnRecord:
        """Make the record of the turn that is due, on replicas of this cost."""
        assert self.turn is not None, f"{self.job.program_id} has no turn due"
        tokens, known = len(self.turn.prompt), self.known_tokens
        record = TurnRecord(
            program_id=self.job.program_id,
            index=len(self.done),
            intended_start_s=self.due_s,
            outcome=outcome,
            prompt_tokens=tokens,
            previous_context_tokens=known,
            alone_s=cost.prefill_s(max(1, tokens - known), known, cost.step_tokens),
        )
        turn = self.under_way
        if turn is None:
            return record
        computed = turn if self.prefill is None else self.prefill
        return replace(
            record,
            first_token_s=turn.first_token_s,
            last_token_s=turn.last_token_s,
            output_tokens=turn.request.num_output_tokens,
            cached_tokens=computed.cached_tokens,
            fetched_tokens=computed.fetched_tokens,
            queue_s=None if turn.admitted_s is None else turn.admitted_s - turn.submitted_s,
        )


class Simulation:
    """Runs ``jobs`` on ``replicas`` that share ``clock``. An instance is used once.

    Args:
        jobs: jobs in the order of their arrivals.
        replicas: replicas, which the router knows by their indices.
        clock: the clock of the replicas.
        foresight: makes the hints that clients send with their turns.
        router: places each turn.
        successors: further jobs, whose arrival times are ignored. One starts when a program ends, or when a rejected
            program may be retried. None: no job follows.
        watch: called after all events of one time; it must not change anything.
        prefill: the replicas that only compute prompts; None: each replica computes its own.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        replicas: Sequence[VirtualReplica],
        clock: ManualClock,
        foresight: Foresight,
        router: TurnRouter,
        successors: Iterator[Job] | None = None,
        watch: Callable[[], None] | None = None,
        prefill: PrefillPool | None = None,
    ) -> None:
        self.timeline = Timeline(clock, self._begin_steps)
        self.routed: dict[tuple[str, int], RoutedTurn] = {}
        """The route of each turn that became due, by its program's id and its index."""
        self._jobs = list(jobs)
        self._replicas = replicas
        self._cost = replicas[0].cost
        self._clock = clock
        self._foresight = foresight
        self._router = router
        self._successors = successors
        self._watch = watch
        self._prefill = prefill
        self._infinite = InfiniteCache(replicas[0].engine.shape.block_size)
        self._steps = [0] * len(replicas)
        """Number of steps that began on each replica."""
        self._ready: set[int] = set()
        """Indices of replicas that changed since the last check for a step."""
        self._programs: dict[str, _Program] = {}
        self._by_turn: dict[str, _Program] = {}
        """Programs with a turn that is due, by the turn's id."""
        self._left = len(jobs)
        """Number of programs that have not ended."""
        for job in jobs:
            self.timeline.at(clock.now_s() + job.arrival_s, partial(self._arrive, job))
        if router.tick_s is not None:
            self.timeline.at(clock.now_s() + router.tick_s, partial(self._tick, router.tick_s))

    def run(self, until_s: float) -> list[ProgramRecord]:
        """Simulate until ``until_s`` or until all programs have ended.

        Return one record for each job, in order, and then those of the children that began.

        Raises:
            IntegrityError: the block counts of a replica are inconsistent at the end.
        """
        self.timeline.run(until_s)
        for replica in self._replicas:
            replica.check_integrity()
        # A refused program counts up to the same time in every run, although one without events left stops earlier.
        end_s = until_s if isfinite(until_s) else self._clock.now_s()
        return [self._record(job, end_s) for job in self._jobs]

    def _arrive(self, job: Job, parent: _Program | None = None) -> None:
        now_s = self._clock.now_s()
        parent_id = None if parent is None else parent.job.program_id
        program = self._programs[job.program_id] = _Program(
            job=job,
            conversation=Conversation(job.program, job.seed),
            identities=self._foresight.identities(job.program_id, job.program, job.seed, parent_id),
            arrival_s=now_s,
            due_s=now_s,
            parent=parent,
        )
        self._due(program)

    def _due(self, program: _Program) -> None:
        """Ask the router for a place, because the program's next turn is due."""
        index, planned = len(program.done), program.job.program
        prompt, program.known_tokens = program.conversation.prompt(planned.turns[index])
        identity = program.identities[index]
        assert identity.key is not None
        ends = self._foresight.ends_known and index == len(planned.turns) - 1
        turn = SimulatedTurn(f"{program.job.program_id}.{index}", identity.key, index, prompt, identity, ends)
        program.turn = turn
        self._by_turn[turn.turn_id] = program
        self.routed[program.job.program_id, index] = RoutedTurn(
            program.due_s, self._infinite.reusable(planned, index, len(prompt), program.known_tokens)
        )
        self._answered(program, self._router.route(turn, self._clock.now_s()))

    def _answered(self, program: _Program, answer: Answer) -> None:
        """Act on the router's answer: send the turn, let it wait, or end its program."""
        routed = self.routed[program.job.program_id, len(program.done)]
        if isinstance(answer, Sent):
            routed.reason, routed.replica, routed.sent_s = answer.reason, answer.replica, self._clock.now_s()
            routed.moved = answer.moved_from is not None
            way_s = self._replicas[answer.replica].cost.turn_s
            if way_s:
                self.timeline.at(self._clock.now_s() + way_s, partial(self._submit, program, answer.replica))
            else:
                self._submit(program, answer.replica)
        elif isinstance(answer, TurnedAway):
            routed.reason, routed.sent_s = answer.reason, self._clock.now_s()
            record = program.turn_record(Outcome.REJECTED, self._cost)
            program.done.append(replace(record, rejected_s=self._clock.now_s() - program.due_s))
            self._over(program, answer.retry_after_s)

    def _waited(self) -> None:
        for turn_id, answer in self._router.waited(self._clock.now_s()):
            self._answered(self._by_turn[turn_id], answer)

    def _tick(self, every_s: float) -> None:
        self._router.tick(self._clock.now_s())
        self._ready.update(range(len(self._replicas)))  # the router may have given them work
        self._waited()
        if self._left:
            self.timeline.at(self._clock.now_s() + every_s, partial(self._tick, every_s))

    def _submit(self, program: _Program, replica: int) -> None:
        """Submit the turn, which has arrived at its replica, or first its prompt to a prefill replica."""
        turn = program.turn
        assert turn is not None
        if self._prefill is not None and (index := self._prefill.takes(turn, replica)) is not None:
            program.prefill = self._prefill.begin(turn, index, program.known_tokens)
            self._ready.add(index)
            return
        self._run(program, replica)

    def _prefilled(self, program: _Program, index: int) -> None:
        """Send the KV of a prompt to the turn's replica. The turn begins there when it has arrived."""
        turn = program.turn
        assert turn is not None and self._prefill is not None
        replica = self.routed[program.job.program_id, turn.index].replica
        assert replica is not None

        def arrived() -> None:
            assert self._prefill is not None
            self._prefill.arrived(turn, replica)
            self._run(program, replica)

        self.timeline.at(self._prefill.ended(turn, index, replica, self._clock.now_s()), arrived)

    def _run(self, program: _Program, replica: int) -> None:
        turn = program.turn
        assert turn is not None
        planned = program.job.program.turns[turn.index]
        program.under_way = self._replicas[replica].submit(
            turn.turn_id, turn.prompt, planned.output_tokens, turn.identity, program.known_tokens, planned.tool
        )
        self._ready.add(replica)

    def _begin_steps(self) -> None:
        while self._ready:
            ready = sorted(self._ready)
            self._ready.clear()
            for index in ready:
                self._begin_step(index)
        if self._watch is not None:
            self._watch()

    def _begin_step(self, index: int) -> None:
        replica = self._replicas[index]
        if replica.interrupted:
            self._end_step(index, self._steps[index])
        if replica.busy:
            return
        seconds = replica.begin_step()
        if seconds is not None:
            self._steps[index] += 1
            self.timeline.at(self._clock.now_s() + seconds, partial(self._end_step, index, self._steps[index]))

    def _end_step(self, index: int, step: int) -> None:
        """End the step with the number ``step`` of a replica, unless an arriving turn has already ended it."""
        if step != self._steps[index] or not self._replicas[index].busy:
            return
        self._ready.add(index)
        for turn in self._replicas[index].end_step():
            request_id = turn.request.request_id
            if request_id.startswith(PREFIX):
                self._prefilled(self._by_turn[request_id.removeprefix(PREFIX)], index)
                continue
            self._turn_ended(self._by_turn.pop(turn.request.request_id), turn, index)

    def _turn_ended(self, program: _Program, turn: VirtualTurn, replica: int) -> None:
        planned = program.job.program.turns[len(program.done)]
        program.done.append(program.turn_record(Outcome.OK, self._cost))
        due, program.turn, program.under_way, program.prefill = program.turn, None, None, None
        assert due is not None
        self._router.ended(due, replica, turn.request.num_tokens, self._clock.now_s())
        if due.ends_program:
            self._replicas[replica].program_ended(due.program)
        if len(program.done) == len(program.job.program.turns):
            self._over(program, 0.0)
        else:
            program.conversation.answered(turn.generated, planned.kept_tokens)
            if planned.children:
                self._start_children(program)
            else:
                self._resume_at(program, self._clock.now_s() + planned.pause_s)
        self._waited()

    def _resume_at(self, program: _Program, due_s: float) -> None:
        program.due_s = due_s
        self.timeline.at(due_s, partial(self._due, program))

    def _start_children(self, parent: _Program) -> None:
        """Start the programs that run in a pause. They are offered from now on, and have records of their own."""
        jobs = children_of(parent.job, len(parent.done) - 1, self._clock.now_s())
        parent.children = len(jobs)
        self._jobs.extend(jobs)
        for job in jobs:
            self.timeline.at(self._clock.now_s(), partial(self._arrive, job, parent))

    def _over(self, program: _Program, again_s: float) -> None:
        """End a program. Its successor arrives after ``again_s`` seconds, which is positive after a rejection.

        A child has no successor. Its parent resumes when all its children have ended, rejected ones too.
        """
        if program.turn is not None:
            self._by_turn.pop(program.turn.turn_id)
            program.turn = None
        if (parent := program.parent) is not None:
            parent.children -= 1
            if not parent.children:
                self._resume_at(parent, self._clock.now_s())
            return
        if self._successors is None:
            self._left -= 1
            return
        job = next(self._successors)
        self._jobs.append(job)
        self.timeline.at(self._clock.now_s() + again_s, partial(self._arrive, job))

    def _record(self, job: Job, end_s: float) -> ProgramRecord:
        """Make the record of a program now. A turn that is due counts as unfinished, up to ``end_s``."""
        program = self._programs.get(job.program_id)
        turns = list(program.done) if program else []
        if program is not None and program.turn is not None:
            turns.append(program.turn_record(Outcome.UNFINISHED, self._cost))
        planned = len(job.program.turns)
        outcome = Outcome.UNFINISHED
        if turns and turns[-1].outcome is Outcome.REJECTED:
            outcome = Outcome.REJECTED
        elif sum(turn.outcome is Outcome.OK for turn in turns) == planned:
            outcome = Outcome.OK
        return ProgramRecord(
            program_id=job.program_id,
            arrival_s=program.arrival_s if program else job.arrival_s,
            outcome=outcome,
            turns=tuple(turns),
            planned_turns=planned,
            kind=job.program.kind,
            until_s=end_s,
        )
