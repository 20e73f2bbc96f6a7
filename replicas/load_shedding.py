"""Load shedding: which new programs a replica refuses, so that no admitted turn waits longer than the policy's bound.

An admitted turn that has waited for a half of the bound is served before all others, in the order of arrival (see
``ValuePerWork``). The bound holds if what is due then can be served in the other half. So the replica takes no new
program while the turns that wait have more work than that. And while a turn has waited for an eighth of the bound, it
refuses the programs that have as much work as such a turn: they would wait as long, and what has less work is served
before. A refused client is answered at once.

A turn that lacks a slot of its LoRA adapter waits although others can be served. It counts as starving only once it has
waited for a half of the bound, after which it gets a slot (`replicas.adapter_slots`).

Sheddable turns (`Hints.sheddable`) wait for the turns of all others, until they have waited for twice the bound. Their
own bound is therefore two and a half times as long. So that they are few then, a replica
refuses sheddable programs at half of that work, and all of them while a turn of another program starves. A sheddable
turn that starves stops sheddable programs only.

Bounds are those of the forecast: turns that take longer than was expected, or more programs that come back at the
same time than ever, can exceed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from vllm.v1.request import Request

from cluster.core.program import ProgramIdentity
from cluster.core.replica_snapshot import program_work_s
from replicas.cost_model import CostModel
from replicas.forecasts import NOTHING_KNOWN, Features
from replicas.policy import Forecast, LoadView, TurnView
from replicas.scheduler import AgentScheduler

STARVING = 1 / 8
"""Share of the bound after which a turn without its first token starves."""
STARVING_WITHOUT_A_SLOT = 1 / 2
"""The same for a turn that lacks a slot of its adapter."""
MAX_BACKLOG = 1 / 2
"""Largest work of the waiting turns, as a share of the bound."""
SHEDDABLE_BACKLOG = 1 / 4
"""The same for sheddable programs, so that they leave room for the work of others."""


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    """A turn that waits for its first token. All values are in seconds."""

    waited_s: float
    turn_s: float
    """Expected work of the turn."""
    program_s: float
    """Expected work of what is left of its program, by `program_work_s` with the given costs, as the router has it."""
    sheddable: bool = False
    """See `Hints.sheddable`."""
    lacks_slot: bool = False
    """Whether other LoRA adapters have all slots."""

    def starves(self, max_wait_s: float) -> bool:
        """Return whether it starves, by the bound on the wait for the first token."""
        return self.waited_s > (STARVING_WITHOUT_A_SLOT if self.lacks_slot else STARVING) * max_wait_s


@dataclass(frozen=True, slots=True)
class Shedding:
    """What a replica refuses now."""

    from_s: float
    """It refuses new programs of this expected work (`program_work_s`), in seconds, or more. inf: it takes all."""
    retry_after_s: float
    """Seconds until the turns that wait now are served."""
    sheddable_from_s: float
    """As ``from_s``, for sheddable programs. It is never more."""

    def refuses(self, work_s: float, *, sheddable: bool = False) -> bool:
        """Return whether a new program of this expected work is refused."""
        return work_s >= (self.sheddable_from_s if sheddable else self.from_s)


TAKES_ALL = Shedding(inf, 0.0, inf)


def shedding(waiting: Sequence[WaitingTurn], max_wait_s: float) -> Shedding:
    """Return what a replica refuses.

    Args:
        waiting: the turns that wait.
        max_wait_s: bound on the seconds from a turn's arrival to its first token.
    """
    backlog_s = sum(turn.turn_s for turn in waiting)
    starving = [turn for turn in waiting if turn.starves(max_wait_s)]
    least_s = min((turn.program_s for turn in starving if not turn.sheddable), default=inf)
    from_s = 0.0 if backlog_s > MAX_BACKLOG * max_wait_s else least_s
    sheddable_from_s = min((turn.program_s for turn in starving), default=inf)
    if least_s < inf or backlog_s > SHEDDABLE_BACKLOG * max_wait_s:
        sheddable_from_s = 0.0
    return Shedding(from_s, backlog_s, sheddable_from_s) if sheddable_from_s < inf else TAKES_ALL


def shedding_of(scheduler: AgentScheduler) -> Shedding:
    """Return what the replica of a scheduler refuses now."""
    max_wait_s = scheduler.policies.max_wait_s
    if max_wait_s is None or not any(scheduler.waiting_queues):
        return TAKES_ALL
    load, given = scheduler.load_now(), scheduler.settings.cost
    requests = _without_a_token(scheduler)
    turns = [scheduler.views.waiting(one) for one in requests]
    token_s = _token_s(load, turns, scheduler.scheduler_config.max_num_seqs)
    waiting = [
        _waiting(turn, load, given, token_s, lacks_slot=scheduler.adapters.lacks(one))
        for turn, one in zip(turns, requests, strict=True)
    ]
    return shedding(waiting, max_wait_s)


def new_work_s(scheduler: AgentScheduler, identity: ProgramIdentity, prompt_tokens: int) -> float:
    """Return the expected work of a new program, as the scheduler forecasts it.

    Args:
        scheduler: the scheduler.
        identity: identity of its first turn.
        prompt_tokens: length of its first prompt.
    """
    features = Features.of("", 0, prompt_tokens) if identity.key is not None else NOTHING_KNOWN
    last = identity.key is None or identity.last_turn
    forecast = scheduler.forecaster.of(features, identity.hints, scheduler.durations, last, identity.forecast)
    return _work_s(scheduler.settings.cost, forecast, prompt_tokens, prompt_tokens, 0)


def _without_a_token(scheduler: AgentScheduler) -> list[Request]:
    return [
        request
        for queue in scheduler.waiting_queues
        for request in queue
        if (turn := scheduler.turns.get(request.request_id)) is not None and turn.first_token_s is None
    ]


def _token_s(load: LoadView, waiting: Sequence[TurnView], max_sequences: int) -> float:
    """Return a token's share of a step, once as many of the waiting turns run as fit, in seconds."""
    turns = load.running + len(waiting)
    tokens = load.running_tokens + sum(turn.tokens for turn in waiting)
    fits = min(1.0, load.facts.capacity_tokens / max(1, tokens), max_sequences / max(1, turns))
    together = max(1, round(fits * turns))
    return load.facts.cost.decode_step_s(together, round(fits * tokens)) / together


def _waiting(turn: TurnView, load: LoadView, given: CostModel, token_s: float, *, lacks_slot: bool) -> WaitingTurn:
    missing = turn.tokens - turn.cached_tokens
    return WaitingTurn(
        waited_s=load.now_s - turn.arrived_s,
        turn_s=missing * load.facts.cost.token_s + max(0.0, turn.forecast.output_tokens) * token_s,
        program_s=_work_s(given, turn.forecast, missing, turn.tokens, turn.generated_tokens),
        sheddable=turn.hints.sheddable,
        lacks_slot=lacks_slot,
    )


def _work_s(costs: CostModel, forecast: Forecast, missing: int, context: int, generated: int) -> float:
    output = max(0.0, forecast.output_tokens - generated)
    later = max(0.0, forecast.later_tokens)
    later_outputs = min(later, max(0.0, forecast.later_turns) * max(0.0, forecast.output_tokens))
    outputs, computed = output + later_outputs, missing + later - later_outputs
    return program_work_s(costs, computed, outputs, context + (output + later) / 2)
