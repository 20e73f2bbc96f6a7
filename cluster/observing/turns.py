"""What clients experience, recorded at the door: each turn from its arrival to its last token, and its program.

A turn whose answer is no stream has its first token when it has its last. A turn that its client got wrong (400, 404,
413, 422) is none.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import time

from cluster import metrics
from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.direct_request import seen_turn
from cluster.goodput import Bound, Outcome, Slo, TurnRecord, Verdict
from cluster.observing.arrival import waited_s
from cluster.observing.meter import Meter
from cluster.observing.shared_ledger import LedgerFallback, SharedLedger
from cluster.observing.slo_ledger import Ended, Over, Served, SloLedger, beside_turns, lone
from cluster.program import DEFAULT_TENANT, ProgramIdentity

OTHER_TENANTS = "other"
"""The label of tenants that the configuration does not name: clients must not make labels."""

SWEEP_S = 0.5
STORE_USER = "verdicts"


class TurnBook:
    """The turns of one door, and their programs.

    Args:
        config: bounds, tenants, and whether anything is recorded.
        clock: all latencies.
        shared: where the parts of programs meet that come through several doors; None: there is one door.
        wall: Unix time.
    """

    def __init__(
        self,
        config: CaesuraConfig,
        clock: Clock,
        shared: SharedLedger | None = None,
        wall: Callable[[], float] = time,
    ) -> None:
        self.enabled = config.metrics.enabled
        self._config = config
        self._clock = clock
        self._wall = wall
        self._shared = shared
        self._meter = Meter(enabled=self.enabled)
        self._ledger = SloLedger(config.control.idle_program_s, config.control.max_programs)
        self._served = config.served
        self._slos: dict[Served, Slo] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin: each series is there before the first turn, and programs that say nothing more are judged."""
        if self.enabled:
            for model in self._served:
                for tenant in {DEFAULT_TENANT, *self._config.tenants}:
                    self._begin_series(Served(model, tenant))
            for kind in LedgerFallback:
                self._meter.begin(metrics.LEDGER_FALLBACKS, kind=kind.value)
            self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def aclose(self) -> None:
        """Stop."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._shared is not None:
            await self._shared.store.close()

    def arrival_s(self, headers: Mapping[str, str]) -> float:
        """When the request that has just come arrived, by the clock."""
        now_s = self._clock.now_s()
        if not self._config.http.trust_request_start:
            return now_s
        return now_s - waited_s(headers, self._wall(), self._config.http.request_timeout_s)

    def begin(self, model: str, identity: ProgramIdentity, arrived_s: float) -> "MeasuredTurn":
        """A turn has come that will be answered, one way or another."""
        served = Served(model, identity.tenant if self._is_named(identity.tenant) else OTHER_TENANTS)
        slo = self._slo_of(served)
        if identity.key is not None and self.enabled:
            self._ledger.began(served, slo, identity.key, arrived_s, self._clock.now_s())
        return MeasuredTurn(self, served, slo, identity, arrived_s)

    def refused(self, headers: Mapping[str, str], tenant: str = DEFAULT_TENANT) -> None:
        """A turn was refused before its body was read; its model is not known, nor what only the body says of it."""
        identity = replace(seen_turn(headers, b"")[0], tenant=tenant)
        self.begin(self._config.model.id, identity, self.arrival_s(headers)).over(Outcome.REJECTED)

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> None:
        """A program has ended; not OK: for another reason than one of its turns."""
        if (ended := self._ledger.ended(key, outcome)) is None:
            return
        if self._shared is not None and outcome is not Outcome.OK:
            self._shared.told(key, ended.served, Over(beside_turns(outcome), False, None), self._clock.now_s())
        self._ended(ended)

    def sweep(self) -> None:
        """Judge the programs that have been idle for too long."""
        for ended in self._ledger.sweep(self._clock.now_s()):
            self._ended(ended)

    async def exchange(self) -> None:
        """With several doors: tell the others, and judge what they have told."""
        if self._shared is None:
            return
        outcomes = await self._shared.exchange()
        for served in outcomes.new:
            self._meter.add(metrics.PROGRAMS, 1, **served._asdict())
        for ended in outcomes.judged:
            self._judge(ended)
        for kind in outcomes.fallbacks:
            self._meter.add(metrics.LEDGER_FALLBACKS, 1, kind=kind.value)
        self._meter.set(metrics.STORE_UP, float(self._shared.store.healthy), by=STORE_USER)
        for failure, total in self._shared.store.failures.items():
            self._meter.count_to(metrics.STORE_FAILURES, total, by=STORE_USER, kind=failure.value)

    # --- called by a MeasuredTurn -------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """By the clock."""
        return self._clock.now_s()

    @property
    def timeout_s(self) -> float:
        """A turn that took so long was not given up by its client."""
        return self._config.http.request_timeout_s

    def taken_back(self, identity: ProgramIdentity) -> None:
        """It was no turn."""
        if identity.key is not None and (ended := self._ledger.taken_back(identity.key, self._clock.now_s())):
            self._ended(ended)

    def over(self, served: Served, slo: Slo, identity: ProgramIdentity, turn: TurnRecord) -> None:
        """A turn is over."""
        self._record(served, slo, turn)
        if identity.key is None:
            self._meter.add(metrics.PROGRAMS, 1, **served._asdict())
            self._judge(lone(served, slo, turn))
            return
        over = self._ledger.over(identity.key, turn, self._clock.now_s(), last=identity.last_turn)
        if over is None:
            return
        if self._shared is not None:
            self._shared.told(identity.key, served, over, turn.intended_start_s)
        elif over.first:
            self._meter.add(metrics.PROGRAMS, 1, **served._asdict())
        if over.ended is not None:
            self._ended(over.ended)

    def _ended(self, program: Ended) -> None:
        if self._shared is None:
            self._judge(program)
        else:
            self._shared.ended(program)

    # --- recording ----------------------------------------------------------------------------------------------------

    def _record(self, served: Served, slo: Slo, turn: TurnRecord) -> None:
        meter, labels = self._meter, served._asdict()
        meter.add(metrics.REQUESTS, 1, **labels, outcome=turn.outcome.value)
        if turn.outcome is not Outcome.OK:
            return
        missed = slo.missed(turn)
        if not missed:
            meter.add(metrics.GOOD_REQUESTS, 1, **labels)
        for bound in missed:
            meter.add(metrics.SLO_MISSES, 1, **labels, bound=bound.value)
        for metric, seconds in (
            (metrics.TTFT, turn.ttft_s),
            (metrics.TPOT, turn.tpot_s),
            (metrics.E2E, turn.e2e_s),
            (metrics.NORMALIZED, turn.normalized_latency_s),
        ):
            if seconds is not None and not (metric is metrics.TPOT and turn.first_token_s == turn.last_token_s):
                meter.observe(metric, seconds, **labels)

    def _judge(self, program: Ended) -> None:
        meter, labels, verdict = self._meter, program.served._asdict(), program.verdict
        meter.add(metrics.PROGRAM_ENDS, 1, **labels, verdict=verdict.value)
        if verdict in (Verdict.GOOD, Verdict.LATE):
            meter.observe(metrics.PROGRAM_S, program.tally.e2e_s, **labels)
            meter.observe(metrics.PROGRAM_WALL_S, program.wall_s, **labels)
            meter.observe(metrics.PROGRAM_TURNS, program.tally.turns, **labels)

    def _begin_series(self, served: Served) -> None:
        begin, labels = self._meter.begin, served._asdict()
        begin(metrics.GOOD_REQUESTS, **labels)
        begin(metrics.PROGRAMS, **labels)
        for outcome in Outcome:
            begin(metrics.REQUESTS, **labels, outcome=outcome.value)
        for bound in Bound:
            begin(metrics.SLO_MISSES, **labels, bound=bound.value)
        for verdict in Verdict:
            begin(metrics.PROGRAM_ENDS, **labels, verdict=verdict.value)

    def _slo_of(self, served: Served) -> Slo:
        if (slo := self._slos.get(served)) is None:
            slo = self._slos[served] = self._served[served.model].slo_of(served.tenant).bounds
        return slo

    def _is_named(self, tenant: str) -> bool:
        return tenant == DEFAULT_TENANT or tenant in self._config.tenants

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()
            await self.exchange()


class Door:
    """Where a process's book is found by what was made before it: the middleware, which Ray brings here pickled."""

    def __init__(self) -> None:
        self._book: TurnBook | None = None

    def attend(self, book: TurnBook) -> None:
        """It is the process's book from now on."""
        self._book = book

    def refused(self, headers: Mapping[str, str], tenant: str) -> None:
        """A turn was refused before anything of it was read."""
        if self._book is not None:
            self._book.refused(headers, tenant)


DOOR = Door()


def refused_at_the_door(headers: Mapping[str, str], tenant: str = DEFAULT_TENANT) -> None:
    """As `TurnBook.refused` of this process's book."""
    DOOR.refused(headers, tenant)


class MeasuredTurn:
    """A turn under way."""

    def __init__(self, book: TurnBook, served: Served, slo: Slo, identity: ProgramIdentity, arrived_s: float) -> None:
        self._book = book
        self._served = served
        self._slo = slo
        self._identity = identity
        self._arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._tokens = 0
        self._over = not book.enabled

    def received(self, tokens: int) -> None:
        """So many have come, all together."""
        if tokens > self._tokens:
            self._tokens = tokens
            self._last_token_s = self._book.now_s()
            if self._first_token_s is None:
                self._first_token_s = self._last_token_s

    def over(self, outcome: Outcome | None) -> None:
        """What became of it; None: it was no turn. Again is nothing."""
        if self._over:
            return
        self._over = True
        if outcome is None:
            self._book.taken_back(self._identity)
            return
        now_s = self._book.now_s()
        last_token_s = now_s if self._last_token_s is None else self._last_token_s
        record = TurnRecord(
            program_id="",
            index=0,
            intended_start_s=self._arrived_s,
            outcome=outcome,
            first_token_s=last_token_s if self._first_token_s is None else self._first_token_s,
            last_token_s=last_token_s,
            output_tokens=self._tokens,
        )
        self._book.over(self._served, self._slo, self._identity, record)

    def gone(self) -> None:
        """Nobody waits for it any more: its time was up, or its client went away."""
        late = self._book.now_s() - self._arrived_s >= self._book.timeout_s
        self.over(Outcome.TIMED_OUT if late else Outcome.UNFINISHED)
