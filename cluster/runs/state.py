"""A run's state, folded from its log, and what comes next: pure, so that any runner goes on from the same log alike.

    Accepted -> [approved calls] -> turn -> tools -> turn -> ... -> Ended

A turn may be tried again: it has no effect beside its text. A tool call may not, unless the tool says so: whoever
takes a run over sets that a call may have been sent before (`CallTools.resumed`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.core.errors import IllegalTransition
from cluster.core.tools import Outcome, ToolOffer
from cluster.runs.call_names import CallNaming
from cluster.runs.events import (
    MAX_OUTPUT_TOKENS,
    MAX_TURNS,
    STOP_SEQUENCE,
    Accepted,
    Call,
    Ended,
    Fault,
    Generated,
    LateAnswer,
    RunEvent,
    RunSpec,
    Status,
    TakenOver,
    ToolAnswer,
    ToolIntent,
    TurnIntent,
    TurnResult,
)

NO_TOOL = "none"
"""The tool choice of a turn that must be the last."""

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RunState:
    """A run, folded from its log."""

    spec: RunSpec
    messages: tuple[dict[str, Any], ...]
    """The conversation as the next turn sees it, without late answers that no turn has seen."""
    token_ids: bytes = b""
    """Ids of the first `covered` messages, as they were sent and generated; empty before the first turn."""
    covered: int = 0
    turns: tuple[TurnResult, ...] = ()
    attempt: int = 0
    """Of the turn under way; 0: none is."""
    calls: tuple[Call, ...] = ()
    """Asked for by the last turn."""
    sent: frozenset[Place] = frozenset()
    """Calls whose intent is in the log."""
    answers: dict[Place, ToolAnswer] = field(default_factory=dict)
    """Of all turns' calls; an asynchronous one's is first that it was started."""
    late: tuple[Place, ...] = ()
    """Asynchronous calls without a final answer."""
    undelivered: tuple[ToolAnswer, ...] = ()
    """Final answers of asynchronous calls that no turn has seen."""
    names: dict[Place, str] = field(default_factory=dict)
    runners: int = 1
    """How many have worked on it."""
    ended: Ended | None = None

    @property
    def output_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def tool_calls(self) -> int:
        """Calls that were sent to a tool."""
        return len(self.sent)

    @property
    def waiting(self) -> tuple[Call, ...]:
        """Calls of the last turn without an answer."""
        return tuple(call for call in self.calls if call.place not in self.answers)

    def offer(self, name: str) -> ToolOffer | None:
        """The tool of this name; None if none was offered."""
        return next((offer for offer in self.spec.offers if offer.name == name), None)

    def known_as(self, call: Call, naming: CallNaming) -> str:
        """Under which name a call's duration is learnt."""
        offer = self.offer(call.name)
        return naming(call.name, call.arguments, None if offer is None else offer.owner)


# --- the fold ---------------------------------------------------------------------------------------------------------


def fold(events: Iterable[RunEvent]) -> RunState | None:
    """The state after ``events``; None if there are none.

    Raises:
        IllegalTransition: it is no log of a run.
    """
    state = None
    for event in events:
        state = begin(event) if state is None else step(state, event)
    return state


def begin(event: RunEvent) -> RunState:
    """The state after a log's first entry.

    Raises:
        IllegalTransition: a log begins otherwise.
    """
    if not isinstance(event, Accepted):
        raise IllegalTransition(f"a run's log begins with {type(event).__name__}")
    spec = event.spec
    prior = {} if spec.prior is None else {"token_ids": spec.prior.token_ids, "covered": spec.prior.messages}
    names = {call.place: call.name for call in spec.approved}
    return RunState(spec, spec.messages, calls=spec.approved, names=names, **prior)  # type: ignore[arg-type]


def step(state: RunState, event: RunEvent) -> RunState:
    """The state after ``event``.

    Raises:
        IllegalTransition: it cannot follow.
    """
    if state.ended is not None:
        raise IllegalTransition(f"run {state.spec.id}: {type(event).__name__} after its end")
    match event:
        case Generated():
            return state
        case TurnIntent():
            delivered = tuple(_late_message(state, answer) for answer in state.undelivered)
            return replace(state, attempt=event.attempt, messages=state.messages + delivered, undelivered=())
        case TurnResult():
            return _turn_done(state, event)
        case ToolIntent():
            return replace(state, sent=state.sent | set(event.places))
        case ToolAnswer():
            return _answered(state, event)
        case LateAnswer():
            late = tuple(place for place in state.late if place != event.answer.place)
            answers = {**state.answers, event.answer.place: event.answer}
            return replace(state, late=late, undelivered=(*state.undelivered, event.answer), answers=answers)
        case TakenOver():
            return replace(state, runners=state.runners + 1)
        case Ended():
            return replace(state, ended=event, attempt=0)
        case Accepted():
            raise IllegalTransition(f"run {state.spec.id} is accepted twice")


def worked_s(events: Iterable[RunEvent]) -> float:
    """Seconds from a run's acceptance on that its log proves: no less than its last runner began before it was gone.

    No wall clock is in it: that of whoever goes on with the run may be another, or have jumped.
    """
    began_s = asked_s = known_s = 0.0
    for event in events:
        match event:
            case TakenOver():
                began_s = asked_s = known_s = max(known_s, event.after_s)
            case TurnResult():
                asked_s = known_s = max(known_s, began_s + event.ended_s)
            case ToolAnswer():
                known_s = max(known_s, asked_s + event.queue_s + event.run_s)
            case _:
                pass
    return known_s


def _turn_done(state: RunState, event: TurnResult) -> RunState:
    before = state.token_ids if event.continued else b""
    message: dict[str, Any] = {"role": "assistant", "content": event.content}
    if event.reasoning:
        message["reasoning"] = event.reasoning
    if event.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in event.calls
        ]
    messages = (*state.messages, message)
    return replace(
        state,
        messages=messages,
        token_ids=before + event.added_ids + event.output_ids,
        covered=len(messages),
        turns=(*state.turns, event),
        attempt=0,
        calls=event.calls,
        names={**state.names, **{call.place: call.name for call in event.calls}},
    )


def _answered(state: RunState, event: ToolAnswer) -> RunState:
    answers = {**state.answers, event.place: event}
    late = (*state.late, event.place) if event.outcome == Outcome.STARTED else state.late
    after = replace(state, answers=answers, late=late)
    if any(runs_here(state, call) for call in after.waiting):
        return after
    # The round is complete as far as it is ours: its answers enter the conversation in the order of the calls.
    new = tuple(
        {"role": "tool", "tool_call_id": call.id, "content": answers[call.place].text}
        for call in state.calls
        if call.place in answers
    )
    return replace(after, messages=state.messages + new)


def _late_message(state: RunState, answer: ToolAnswer) -> dict[str, Any]:
    return late_message(state.names.get(answer.place, "a tool"), answer.text)


def late_message(name: str, text: str) -> dict[str, Any]:
    """The second answer of a call: the first was that its tool had started."""
    return {"role": "user", "content": f"[The call of {name} that was started earlier has ended]\n{text}"}


def conversation(state: RunState) -> tuple[dict[str, Any], ...]:
    """All messages, for a run that goes on from here."""
    return state.messages + tuple(_late_message(state, answer) for answer in state.undelivered)


# --- what comes next --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskTurn:
    """Log the intent, and ask a replica for the turn."""

    turn: int
    attempt: int
    tool_choice: Any


@dataclass(frozen=True, slots=True)
class CallTools:
    """Log the intent, run these calls together, log the answers."""

    calls: tuple[Call, ...]
    resumed: bool
    """Another runner may have sent them."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Log these answers; nothing is run."""

    answers: tuple[ToolAnswer, ...]


@dataclass(frozen=True, slots=True)
class AwaitLate:
    """The model is done, but tools that it started are not: wait for one of them."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Log the end."""

    status: Status
    reason: str | None = None
    fault: Fault | None = None


Next = AskTurn | CallTools | Refuse | AwaitLate | Finish


def next_step(state: RunState) -> Next | None:
    """What comes next; None after the end."""
    if state.ended is not None:
        return None
    if state.attempt:
        return _ask(state)
    last = state.turns[-1] if state.turns else None
    if last is not None and (cut := _cut(last)):
        return Finish("incomplete", cut)
    ours = tuple(call for call in state.waiting if runs_here(state, call))
    if ours:
        return _call(state, ours)
    if state.waiting:
        # The caller's turn: it runs a tool, or consents to one.
        return AwaitLate() if state.late else Finish("completed")
    if last is not None and not last.calls and not state.undelivered:
        return AwaitLate() if state.late else Finish("completed")
    if state.output_tokens >= state.spec.limits.output_tokens:
        return Finish("incomplete", MAX_OUTPUT_TOKENS)
    if len(state.turns) >= state.spec.limits.turns:
        return Finish("incomplete", MAX_TURNS)
    return _ask(state)


def _cut(turn: TurnResult) -> str | None:
    """Why a run can go no further after a turn that was cut."""
    if turn.finish_reason == "stop" and turn.unfinished:
        return STOP_SEQUENCE
    return MAX_OUTPUT_TOKENS if turn.finish_reason == "length" or turn.unfinished else None


def runs_here(state: RunState, call: Call) -> bool:
    """The cluster answers this call: by running the tool, or, where nobody offered it, by saying so."""
    if call.turn == 0:
        return True
    offer = state.offer(call.name)
    if offer is None:
        return any(offer.here for offer in state.spec.offers)
    return offer.here and not offer.approval


def _ask(state: RunState) -> Next:
    number, attempt = len(state.turns) + 1, state.attempt + 1
    if attempt > state.spec.limits.turn_attempts:
        return Finish("failed", fault=Fault("server_error", f"turn {number} was lost {attempt - 1} times", status=502))
    forced = state.spec.tool_choices
    choice = forced[number - 1] if number <= len(forced) else state.spec.tool_choice
    limits = state.spec.limits
    if state.spec.offers and (number >= limits.turns or state.tool_calls >= limits.tool_calls):
        choice = NO_TOOL
    return AskTurn(number, attempt, choice)


def _call(state: RunState, calls: tuple[Call, ...]) -> Next:
    sent = tuple(call for call in calls if call.place in state.sent)
    if sent:
        return CallTools(sent, resumed=True)
    room = max(0, state.spec.limits.tool_calls - state.tool_calls)
    refused = [_refusal(call, _unknown(state, call)) for call in calls if _unknown(state, call)]
    known = [call for call in calls if not _unknown(state, call)]
    limit = f"a run may call {state.spec.limits.tool_calls} tools, and has"
    refused += [_refusal(call, limit) for call in known[room:]]
    return Refuse(tuple(refused)) if refused else CallTools(tuple(known), resumed=False)


def _unknown(state: RunState, call: Call) -> str:
    if call.turn == 0 or state.offer(call.name) is not None:
        return ""
    there_are = ", ".join(sorted(offer.name for offer in state.spec.offers))
    return f"there is no tool {call.name[:200]!r}; there are: {there_are}"


def _refusal(call: Call, why: str) -> ToolAnswer:
    return ToolAnswer(call.turn, call.index, Outcome.REFUSED, f"{Outcome.REFUSED}: {why}")
