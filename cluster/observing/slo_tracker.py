"""SLO metrics of an ingress: it measures each turn from its arrival to its last token, and judges each program.

The first token of an answer that is not a stream arrives together with the last. An invalid request (400, 404, 413,
422) does not count as a turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from time import time
from typing import Protocol, Self

from cluster.api.openai import SSE_DONE, ErrorMap, contains_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import OVERLOAD, HttpError, Overloaded, Quarantined
from cluster.core.identity import identity_of_headers
from cluster.core.program import DEFAULT_TENANT, ProgramIdentity
from cluster.core.slo import Bound, Outcome, Slo, TurnRecord, Verdict
from cluster.core.supervision import SupervisedTasks
from cluster.observing import catalogue as metrics
from cluster.observing.meter import Meter
from cluster.observing.program_tracker import (
    DegradedVerdict,
    EndedProgram,
    ProgramTracker,
    Served,
    SharedSloTracker,
    TurnEnd,
    outside_turns,
    single_turn_program,
)
from cluster.observing.recorders import OTHER_TENANTS
from cluster.store.slo_sums import SloSumStore

COMPONENT = "slo_tracker"
EXCHANGE_PERIOD_S = 0.5
NO_BOUNDS = Slo()
"""Of sheddable turns, which may wait for all others."""

REQUEST_START = "x-request-start"
"""The header in which proxies send the Unix time at which they received a request. The unit may be seconds, milli- or
microseconds, and the value may begin with `t=`."""
_SCALES = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6))
"""Upper bounds of Unix times in seconds, milli- and microseconds, with their factors to seconds. The range of each unit
begins in 1973."""


def request_start(value: str) -> float | None:
    """Return the Unix time in an `X-Request-Start` header in seconds; None: the value is invalid."""
    try:
        number = float(value.strip().removeprefix("t="))
    except ValueError:
        return None
    return next((number * scale for bound, scale in _SCALES if 0 < number < bound), None)


def waited_s(headers: Mapping[str, str], wall_s: float, limit_s: float) -> float:
    """Return the seconds that a request waited in proxies before it arrived here.

    Args:
        headers: the headers of the request.
        wall_s: the current Unix time in seconds. If a proxy's clock is ahead of it, the wait is 0.
        limit_s: upper bound of the result.
    """
    started_s = request_start(headers.get(REQUEST_START, ""))
    return 0.0 if started_s is None else min(max(0.0, wall_s - started_s), limit_s)


class SloTracker:
    """The turns of one ingress, and their programs.

    Args:
        config: has the SLO bounds, the tenants, and whether metrics are recorded.
        clock: measures all latencies.
        shared: sums programs over several ingresses; None: there is one ingress.
        wall: returns the Unix time in seconds.
        sleep: waits between two exchanges.
    """

    def __init__(
        self,
        config: CaesuraConfig,
        clock: Clock,
        shared: SharedSloTracker | None = None,
        *,
        wall: Callable[[], float] = time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.enabled = config.metrics.enabled
        self._config = config
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._shared = shared
        self._meter = Meter(enabled=self.enabled)
        self._programs = ProgramTracker(config.limits.program_ttl_s, config.limits.max_programs)
        self._served = config.served
        self._adapters = config.adapters
        self._slos: dict[Served, Slo] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._open: set[MeasuredTurn] = set()
        self._tasks = SupervisedTasks(COMPONENT, clock, sleep=sleep)

    @classmethod
    def for_ingresses(cls, config: CaesuraConfig, clock: Clock, number: int) -> "SloTracker":
        """Make the tracker of one of ``number`` ingresses.

        Raises:
            ConfigError: the store's URL is invalid.
        """
        if number == 1 or not config.metrics.enabled:
            return cls(config, clock)
        idle_s = config.limits.program_ttl_s
        # The sums outlive the idle time, so that they are still there when an ingress finds the program idle.
        store = SloSumStore(config.redis.url, timeout_s=config.redis.timeout_s, expiry_s=2 * idle_s, clock=clock)
        return cls(config, clock, SharedSloTracker(store, clock, idle_s))

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._tasks.failed

    def open(self) -> None:
        """Export each series before the first turn, and start to judge programs that have ended or are idle."""
        if self.enabled:
            for model in self._served:
                for tenant in {DEFAULT_TENANT, *self._config.tenants}:
                    self._begin_series(Served(model, tenant))
                for reason in DegradedVerdict:
                    self._meter.begin(metrics.DEGRADED_DECISIONS, **_degraded(model, reason))
            self._tasks.start("judge programs", self._judge_forever)

    async def aclose(self) -> None:
        """Stop judging programs, and close the store."""
        await self._tasks.aclose()
        if self._shared is not None:
            await self._shared.store.close()

    def arrival_s(self, headers: Mapping[str, str]) -> float:
        """Return the clock's time at which the current request arrived (seconds)."""
        now_s = self._clock.now_s()
        if not self._config.http.trust_request_start:
            return now_s
        return now_s - waited_s(headers, self._wall(), self._config.http.request_timeout_s)

    def counts(self, model: str) -> tuple[int, int]:
        """Return the number of the model's turns that have ended, and of those that missed their SLO.

        A turn in flight whose first token is late counts already, since under overload turns end long after. A turn
        whose client disconnected does not count, nor does one in flight while its bound is unknown. Without metrics,
        none does.
        """
        turns, missed = self._counts.get(model, (0, 0))
        now_s = self._clock.now_s()
        late = sum(turn.is_late(model, now_s) for turn in self._open)
        return turns + late, missed + late

    def begin(
        self, model: str, identity: ProgramIdentity, arrived_s: float, *, is_repeated: bool = False
    ) -> "MeasuredTurn":
        """Record the arrival of a turn, and return the object that measures it.

        Args:
            model: the model, or an adapter of it.
            identity: the identity. Bounds do not apply to a sheddable turn, which may wait for all others.
            arrived_s: time of the arrival in seconds.
            is_repeated: whether the turn is sent again if it is rejected, so that a rejection is not its end.
        """
        served = Served(
            self._adapters.get(model, model), identity.tenant if self._is_named(identity.tenant) else OTHER_TENANTS
        )
        slo = NO_BOUNDS if identity.hints.sheddable else self._slo_of(served)
        if identity.key is not None and self.enabled:
            self._programs.turn_began(served, slo, identity.key, arrived_s, self._clock.now_s())
        turn = MeasuredTurn(self, served, slo, identity, arrived_s, is_repeated=is_repeated)
        if self.enabled:
            self._open.add(turn)
        return turn

    def record_rejection(
        self, headers: Mapping[str, str], tenant: str = DEFAULT_TENANT, reason: str = OVERLOAD
    ) -> None:
        """Record a turn that was rejected before its body was read. It counts for the first model, since its model is
        not known, and as a rejection of no model.

        Args:
            headers: headers of the request.
            tenant: its tenant.
            reason: the error's code.
        """
        self.rejected(reason)
        identity = replace(identity_of_headers(headers), tenant=tenant)
        self.begin(self._config.model.id, identity, self.arrival_s(headers)).over(Outcome.REJECTED)

    def rejected(self, reason: str, model: str = "") -> None:
        """Record a rejection in front of the router, for a reason (an error's code). "": its model is not known."""
        self._meter.add(metrics.REQUESTS_REJECTED, 1, model=model, reason=reason)

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> None:
        """Record the end of a program. An outcome other than OK has a cause outside of its turns."""
        if (ended := self._programs.program_ended(key, outcome)) is None:
            return
        if self._shared is not None and outcome is not Outcome.OK:
            end = TurnEnd(outside_turns(outcome), False, None)
            self._shared.turn_ended(key, ended.served, end, self._clock.now_s())
        self._program_over(ended)

    def sweep(self) -> None:
        """Judge the programs that have been idle for too long."""
        for ended in self._programs.sweep(self._clock.now_s()):
            self._program_over(ended)

    async def exchange(self) -> None:
        """Exchange turns with the other ingresses, and judge the programs that are due. A single ingress does
        nothing.
        """
        if self._shared is None:
            return
        exchanged = await self._shared.exchange()
        for served in exchanged.new:
            self._meter.add(metrics.PROGRAMS, 1, **served._asdict())
        for ended in exchanged.judged:
            self._judge(ended)
        for (model, reason), number in exchanged.degraded.items():
            self._meter.add(metrics.DEGRADED_DECISIONS, number, **_degraded(model, reason))
        self._meter.set(metrics.STORE_UP, float(self._shared.store.healthy), component=COMPONENT)
        self._meter.record(metrics.STORE_FAILURES, {COMPONENT: self._shared.store.failures})

    # --- called by a MeasuredTurn -------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Return the clock's time (seconds)."""
        return self._clock.now_s()

    @property
    def timeout_s(self) -> float:
        """Timeout of a turn in seconds. A turn that ends without an answer after this time counts as timed out."""
        return self._config.http.request_timeout_s

    def turn_closed(self, turn: "MeasuredTurn") -> None:
        """Record that the turn is no longer in flight."""
        self._open.discard(turn)

    def turn_withdrawn(self, identity: ProgramIdentity) -> None:
        """Record that the request does not count as a turn."""
        if identity.key is not None and (ended := self._programs.turn_withdrawn(identity.key, self._clock.now_s())):
            self._program_over(ended)

    def turn_ended(self, served: Served, slo: Slo, identity: ProgramIdentity, turn: TurnRecord) -> None:
        """Record a turn that has ended."""
        self._record(served, slo, turn)
        if identity.key is None:
            self._meter.add(metrics.PROGRAMS, 1, **served._asdict())
            self._judge(single_turn_program(served, slo, turn))
            return
        end = self._programs.turn_ended(identity.key, turn, self._clock.now_s(), last=identity.last_turn)
        if end is None:
            return
        if self._shared is not None:
            self._shared.turn_ended(identity.key, served, end, turn.intended_start_s)
        elif end.first:
            self._meter.add(metrics.PROGRAMS, 1, **served._asdict())
        if end.ended is not None:
            self._program_over(end.ended)

    def _program_over(self, program: EndedProgram) -> None:
        if self._shared is None:
            self._judge(program)
        else:
            self._shared.program_ended(program)

    # --- recording ----------------------------------------------------------------------------------------------------

    def _record(self, served: Served, slo: Slo, turn: TurnRecord) -> None:
        meter, labels = self._meter, served._asdict()
        meter.add(metrics.REQUESTS, 1, **labels, outcome=turn.outcome.value)
        missed = slo.missed(turn) if turn.outcome is Outcome.OK else ()
        if turn.outcome is not Outcome.UNFINISHED:
            turns, late = self._counts.get(served.model, (0, 0))
            self._counts[served.model] = (turns + 1, late + (bool(missed) or turn.outcome is not Outcome.OK))
        if turn.outcome is not Outcome.OK:
            return
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

    def _judge(self, program: EndedProgram) -> None:
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

    async def _judge_forever(self) -> None:
        while True:
            await self._sleep(EXCHANGE_PERIOD_S)
            self.sweep()
            await self.exchange()


def _degraded(model: str, reason: DegradedVerdict) -> dict[str, str]:
    return {"model": model, "component": COMPONENT, "reason": reason.value}


class MeasuredTurn:
    """A turn in flight."""

    def __init__(
        self,
        tracker: SloTracker,
        served: Served,
        slo: Slo,
        identity: ProgramIdentity,
        arrived_s: float,
        *,
        is_repeated: bool = False,
    ) -> None:
        self._tracker = tracker
        self._served = served
        self._slo = slo
        self._identity = identity
        self._arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._tokens = 0
        self._alone_s: float | None = None
        self._over = not tracker.enabled
        self._is_repeated = is_repeated

    def is_late(self, model: str, now_s: float) -> bool:
        """Whether it is a turn of this model whose first token is, or was, later than its SLO allows."""
        if self._served.model != model or (self._slo.slowdown is not None and self._alone_s is None):
            return False
        bound_s = self._slo.ttft_bound_s(self._alone_s)
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        return bound_s is not None and first_token_s - self._arrived_s > bound_s

    def received(self, tokens: int) -> None:
        """Record the number of tokens in the answer so far."""
        if tokens > self._tokens:
            self._tokens = tokens
            self._last_token_s = self._tracker.now_s()
            if self._first_token_s is None:
                self._first_token_s = self._last_token_s

    def takes_alone(self, alone_s: float | None) -> None:
        """Record the seconds that its first token would take alone; None: they are unknown."""
        self._alone_s = alone_s

    def over(self, outcome: Outcome | None) -> None:
        """Record the end of the turn; None: the request does not count as a turn. Only the first call has an effect."""
        if self._over:
            return
        self._over = True
        self._tracker.turn_closed(self)
        if outcome is None or (outcome is Outcome.REJECTED and self._is_repeated):
            self._tracker.turn_withdrawn(self._identity)
            return
        now_s = self._tracker.now_s()
        last_token_s = now_s if self._last_token_s is None else self._last_token_s
        record = TurnRecord(
            program_id="",
            index=0,
            intended_start_s=self._arrived_s,
            outcome=outcome,
            first_token_s=last_token_s if self._first_token_s is None else self._first_token_s,
            last_token_s=last_token_s,
            output_tokens=self._tokens,
            alone_s=self._alone_s,
        )
        self._tracker.turn_ended(self._served, self._slo, self._identity, record)

    def gone(self) -> None:
        """Record that the turn timed out or that its client disconnected."""
        late = self._tracker.now_s() - self._arrived_s >= self._tracker.timeout_s
        self.over(Outcome.TIMED_OUT if late else Outcome.UNFINISHED)


# --- rejections by middleware -----------------------------------------------------------------------------------------


class _Process:
    """Holds the tracker of this process. Ray unpickles the middleware before the tracker exists."""

    tracker: SloTracker | None = None


def set_process_tracker(tracker: SloTracker) -> None:
    """Make this the tracker to which `record_rejection` reports."""
    _Process.tracker = tracker


def record_rejection(headers: Mapping[str, str], tenant: str = DEFAULT_TENANT, reason: str = OVERLOAD) -> None:
    """Call `SloTracker.record_rejection` of this process's tracker, if there is one."""
    if _Process.tracker is not None:
        _Process.tracker.record_rejection(headers, tenant, reason)


# --- answers ----------------------------------------------------------------------------------------------------------

_TIMEOUTS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT)


def outcome_of(error: HttpError) -> Outcome | None:
    """Return the outcome of a turn that ended with this error; None: the request was invalid and is not a turn."""
    if isinstance(error, Overloaded):
        return Outcome.REJECTED
    if error.status in _TIMEOUTS:
        return Outcome.TIMED_OUT
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Quarantined):
        return None
    return Outcome.FAILED


class CountedAnswers(Protocol):
    """The pieces of an answer, and the number of tokens in them."""

    @property
    def output_tokens(self) -> int:
        """Number of tokens of the answer so far."""
        ...

    @property
    def alone_s(self) -> float | None:
        """Seconds that its first token would take alone; None: they are unknown."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes | HttpError: ...

    def cancel(self) -> None:
        """Stop the work on the answer. After its end, it has no effect."""
        ...


class MeasuredAnswers:
    """Passes a turn's answer on to the client, and records the turn.

    Args:
        answers: the answer.
        turn: the turn that it answers.
        error_map: maps every exception to an HTTP error.
    """

    def __init__(self, answers: CountedAnswers, turn: MeasuredTurn, error_map: ErrorMap) -> None:
        self._answers = answers
        self._turn = turn
        self._error_map = error_map

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        try:
            piece = await anext(self._answers)
        except StopAsyncIteration:
            self._turn.over(Outcome.FAILED)
            raise
        except Exception as error:
            self._turn.over(outcome_of(self._error_map(error)))
            raise
        if isinstance(piece, HttpError):
            self._turn.over(outcome_of(piece))
            return piece
        self._turn.takes_alone(self._answers.alone_s)
        self._turn.received(self._answers.output_tokens)
        if piece.startswith(b"{"):
            self._turn.over(Outcome.OK)
        elif piece.endswith(SSE_DONE):
            self._turn.over(Outcome.FAILED if contains_error(piece) else Outcome.OK)
        return piece

    def cancel(self) -> None:
        """Stop the work on the answer, and record the end of a turn that has not ended."""
        self._answers.cancel()
        self._turn.gone()
