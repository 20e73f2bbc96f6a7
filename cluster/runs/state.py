"""A run's state, computed from its log, and its next step. Both are pure, so that every runner continues a log alike.

    Accepted -> [approved calls] -> turn -> tools -> turn -> ... -> Ended

A turn may be tried again, because its text is its only effect. A tool call may not, unless the tool is idempotent: a
runner that takes a run over marks calls that may have been sent before (`CallTools.resumed`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.core.answer_cut import shortened
from cluster.core.errors import IllegalTransition
from cluster.core.tools import Outcome, ToolOffer, images_message, late_message
from cluster.runs.call_names import CallNaming
from cluster.runs.compaction import MAX_SUMMARY_TOKENS, MIN_SUMMARY_TOKENS, compacted
from cluster.runs.events import (
    MAX_OUTPUT_TOKENS,
    MAX_TURNS,
    STOP_SEQUENCE,
    Accepted,
    Call,
    EarlyEnd,
    EarlyIntent,
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
    Truncated,
    TurnIntent,
    TurnResult,
)
from cluster.runs.tool_images import urls_of_tools
from cluster.runs.truncation import without_oldest

NO_TOOL = "none"
"""The tool choice of a turn that must be the last."""

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's state, computed from its log."""

    spec: RunSpec
    messages: tuple[dict[str, Any], ...]
    """The conversation as the next turn gets it, without late answers that no turn has got."""
    token_ids: bytes = b""
    """Ids of the first `covered` messages, as they were sent and generated. They are empty before the first turn."""
    covered: int = 0
    unread: tuple[int, ...] = ()
    """Places in `messages` of answers of the cluster's tools that no turn has read."""
    turns: tuple[TurnResult, ...] = ()
    attempt: int = 0
    """Number of the attempt at the current turn. 0 if there is none."""
    summarising: bool = False
    """Whether the current turn writes a summary."""
    calls: tuple[Call, ...] = ()
    """Calls of the last turn."""
    sent: frozenset[Place] = frozenset()
    """Places of the calls whose intent is in the log."""
    early: dict[Place, EarlyIntent] = field(default_factory=dict)
    """Calls that were started before their turn had ended, without those whose answers are not used."""
    unused: int = 0
    """Number of calls that were started early and whose answers are not used."""
    answers: dict[Place, ToolAnswer] = field(default_factory=dict)
    """Answers of all turns' calls. The first answer of an asynchronous call is that it was started."""
    late: tuple[Place, ...] = ()
    """Places of asynchronous calls without a final answer."""
    undelivered: tuple[ToolAnswer, ...] = ()
    """Final answers of asynchronous calls that no turn has got."""
    names: dict[Place, str] = field(default_factory=dict)
    runners: int = 1
    """Number of runners that have worked on the run."""
    ended: Ended | None = None

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all turns."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def tool_calls(self) -> int:
        """Number of calls that were sent to a tool."""
        return len(self.sent | self.early.keys()) + self.unused

    @property
    def images(self) -> Iterator[str]:
        """The images of tools' answers so far, those in the conversation before the run included, as URLs."""
        yield from urls_of_tools(self.spec.messages)
        for answer in self.answers.values():
            yield from answer.images

    @property
    def waiting(self) -> tuple[Call, ...]:
        """Calls of the last turn without an answer."""
        return tuple(call for call in self.calls if call.place not in self.answers)

    @property
    def unexplained(self) -> tuple[EarlyIntent, ...]:
        """Calls that were started early and are no calls of a turn that has ended: these have answers or will have one.

        While a turn goes on, its own are among them.
        """
        made = {(call.place, call.name, call.arguments) for turn in self.turns for call in turn.calls}
        return tuple(
            early
            for early in self.early.values()
            if (early.call.place, early.call.name, early.call.arguments) not in made
        )

    def offer(self, name: str) -> ToolOffer | None:
        """Return the tool of this name, or None if none was offered."""
        return next((offer for offer in self.spec.offers if offer.name == name), None)

    def known_as(self, call: Call, naming: CallNaming) -> str:
        """Return the name under which a call's duration is learnt."""
        offer = self.offer(call.name)
        return naming(call.name, call.arguments, None if offer is None else offer.tool)


# --- the fold ---------------------------------------------------------------------------------------------------------


def fold(events: Iterable[RunEvent]) -> RunState | None:
    """Return the state after ``events``, or None if there are none.

    Raises:
        IllegalTransition: the events are not the log of a run.
    """
    state = None
    for event in events:
        state = begin(event) if state is None else step(state, event)
    return state


def begin(event: RunEvent) -> RunState:
    """Return the state after a log's first entry.

    Raises:
        IllegalTransition: the entry is not `Accepted`.
    """
    if not isinstance(event, Accepted):
        raise IllegalTransition(f"a run's log begins with {type(event).__name__}")
    spec = event.spec
    prior = {} if spec.prior is None else {"token_ids": spec.prior.token_ids, "covered": spec.prior.messages}
    names = {call.place: call.name for call in spec.approved}
    return RunState(spec, spec.messages, calls=spec.approved, names=names, unread=spec.unread, **prior)  # type: ignore[arg-type]


def step(state: RunState, event: RunEvent) -> RunState:
    """Return the state after ``event``.

    Raises:
        IllegalTransition: the event cannot follow.
    """
    if state.ended is not None:
        raise IllegalTransition(f"run {state.spec.id}: {type(event).__name__} after its end")
    match event:
        case Generated():
            return state
        case TurnIntent():
            delivered = _late_messages(state)
            after = _with_answers(state, delivered)
            return replace(after, attempt=event.attempt, undelivered=(), summarising=event.summary)
        case TurnResult():
            return _summarised(state, event) if event.summary else _turn_done(state, event)
        case ToolIntent():
            return replace(state, sent=state.sent | set(event.places))
        case EarlyIntent():
            return replace(state, early={**state.early, event.call.place: event})
        case EarlyEnd():
            early = {place: one for place, one in state.early.items() if place != event.place}
            return replace(state, early=early, unused=state.unused + 1)
        case ToolAnswer():
            return _answered(state, event)
        case LateAnswer():
            late = tuple(place for place in state.late if place != event.answer.place)
            answers = {**state.answers, event.answer.place: event.answer}
            return replace(state, late=late, undelivered=(*state.undelivered, event.answer), answers=answers)
        case Truncated():
            return _truncated(state, event)
        case TakenOver():
            # Of early calls whose turn has ended, another runner does not know more than of other calls.
            ended = state.early.keys() - {early.call.place for early in state.unexplained}
            return replace(state, runners=state.runners + 1, sent=state.sent | ended)
        case Ended():
            return replace(state, ended=event, attempt=0)
        case Accepted():
            raise IllegalTransition(f"run {state.spec.id} is accepted twice")


def worked_s(events: Iterable[RunEvent]) -> float:
    """Return the seconds since a run's acceptance that its log proves.

    It is at least the time at which the last runner took the run over. It does not use a wall clock, because that of
    the next runner may differ or have jumped.
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


def _with_answers(state: RunState, messages: tuple[dict[str, Any], ...]) -> RunState:
    first = len(state.messages)
    places = (first + place for place, message in enumerate(messages) if isinstance(message["content"], str))
    return replace(state, messages=state.messages + messages, unread=(*state.unread, *places))


def cut_answers(state: RunState, chars: int | None) -> tuple[int, ...]:
    """Return the places of the unread answers that are longer than ``chars``. None: there are none."""
    if chars is None:
        return ()
    return tuple(place for place in state.unread if len(state.messages[place]["content"]) > chars)


def _as_read(state: RunState, chars: int | None) -> tuple[dict[str, Any], ...]:
    """Return the messages as the turn has read them, with long answers shortened to ``chars`` characters."""
    if not (cut := cut_answers(state, chars)) or chars is None:
        return state.messages
    return tuple(
        {**message, "content": shortened(message["content"], chars)} if place in cut else message
        for place, message in enumerate(state.messages)
    )


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
    messages = (*_as_read(state, event.answer_chars), message)
    return replace(
        state,
        messages=messages,
        token_ids=before + event.added_ids + event.output_ids,
        covered=len(messages),
        unread=(),
        turns=(*state.turns, event),
        attempt=0,
        calls=event.calls,
        names={**state.names, **{call.place: call.name for call in event.calls}},
    )


def _truncated(state: RunState, event: Truncated) -> RunState:
    """Return the state without the oldest messages. The attempt does not count, because nothing was generated."""
    stay = without_oldest(state.messages, event.groups)
    messages = tuple(state.messages[place] for place in stay)
    new_places = {place: new for new, place in enumerate(stay)}
    unread = tuple(new_places[place] for place in state.unread if place in new_places)
    attempt = max(0, state.attempt - 1)
    return replace(state, messages=messages, unread=unread, token_ids=b"", covered=0, attempt=attempt)


def is_whole_summary(turn: TurnResult) -> bool:
    """Return whether the turn of a summary wrote one, to its end."""
    return bool(turn.content.strip()) and turn.finish_reason != "length"


def _summarised(state: RunState, event: TurnResult) -> RunState:
    """Return the state after a summary's turn. Without a whole summary, the conversation stays as it is."""
    after = replace(state, turns=(*state.turns, event), attempt=0, calls=(), unread=())
    if not is_whole_summary(event):
        return replace(after, unread=state.unread)
    return replace(after, messages=compacted(state.messages, event.content), token_ids=b"", covered=0)


def _answered(state: RunState, event: ToolAnswer) -> RunState:
    answers = {**state.answers, event.place: event}
    late = (*state.late, event.place) if event.outcome == Outcome.STARTED else state.late
    after = replace(state, answers=answers, late=late)
    if any(runs_here(state, call) for call in after.waiting):
        return after
    # The round is complete as far as it is ours: its answers enter the conversation in the order of the calls.
    answered = [(call, answers[call.place]) for call in state.calls if call.place in answers]
    new = [{"role": "tool", "tool_call_id": call.id, "content": answer.text} for call, answer in answered]
    images = images_message([image for _, answer in answered for image in answer.images])
    return _with_answers(after, (*new, *images))


def _late_messages(state: RunState) -> tuple[dict[str, Any], ...]:
    messages: list[dict[str, Any]] = []
    for answer in state.undelivered:
        messages.append(late_message(state.names.get(answer.place, "a tool"), answer.text))
        messages += images_message(answer.images)
    return tuple(messages)


def conversation(state: RunState) -> tuple[dict[str, Any], ...]:
    """Return all messages, for a run that continues from here."""
    return state.messages + _late_messages(state)


# --- what comes next --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskTurn:
    """Log the intent, and request the turn from a replica."""

    turn: int
    attempt: int
    tool_choice: Any
    summary: bool = False
    """Whether the turn writes a summary of the conversation."""


@dataclass(frozen=True, slots=True)
class CallTools:
    """Log the intent, run these calls together, and log the answers."""

    calls: tuple[Call, ...]
    resumed: bool
    """Whether another runner may have sent the calls."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Log these answers, without running anything."""

    answers: tuple[ToolAnswer, ...]


@dataclass(frozen=True, slots=True)
class AwaitLate:
    """Wait for one of the tools that the model started. The model itself is done."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Log the end of the run."""

    status: Status
    reason: str | None = None
    fault: Fault | None = None


Next = AskTurn | CallTools | Refuse | AwaitLate | Finish


def next_step(state: RunState) -> Next | None:
    """Return the next step, or None after the end."""
    if state.ended is not None:
        return None
    if not state.spec.generate:
        return Finish("completed")
    if state.attempt:
        return _ask(state, state.summarising)
    last = state.turns[-1] if state.turns else None
    if last is not None and last.summary:
        return _after_summary(state, last)
    if last is not None and (cut := _cut(last)):
        return Finish("incomplete", cut)
    ours = tuple(call for call in state.waiting if runs_here(state, call))
    if ours:
        return _call(state, ours)
    if state.waiting:
        # The caller has to act: it runs a tool, or approves one.
        return AwaitLate() if state.late else Finish("completed")
    # A late answer is unread if the turn that brings it did not fit and is tried again.
    if last is not None and not last.calls and not state.undelivered and not state.unread:
        return AwaitLate() if state.late else Finish("completed")
    return _further(state, _must_summarise(state))


def _further(state: RunState, summary: bool) -> Next:
    """Return the next turn, or the end if the limits allow none."""
    if state.output_tokens >= state.spec.limits.output_tokens:
        return Finish("incomplete", MAX_OUTPUT_TOKENS)
    if len(state.turns) >= state.spec.limits.turns:
        return Finish("incomplete", MAX_TURNS)
    return _ask(state, summary)


def summary_tokens(state: RunState) -> int:
    """Return the largest number of tokens of a summary now. At least as many are left for the answer after it."""
    left = state.spec.limits.output_tokens - state.output_tokens
    alone = state.spec.compaction is not None and state.spec.compaction.alone
    return min(MAX_SUMMARY_TOKENS, left if alone else left // 2)


def _must_summarise(state: RunState) -> bool:
    """Return whether the conversation is summarised before its next turn.

    Each turn that wrote no whole summary doubles the threshold, since the next one probably writes none either.
    """
    compaction = state.spec.compaction
    if compaction is None or compaction.alone:
        return compaction is not None
    tokens = compaction.tokens
    if state.turns:
        tokens = state.turns[-1].prompt_tokens + state.turns[-1].output_tokens
    leaves_a_turn = len(state.turns) + 1 < state.spec.limits.turns
    threshold = compaction.threshold << sum(turn.summary and not is_whole_summary(turn) for turn in state.turns)
    return tokens >= threshold and leaves_a_turn and summary_tokens(state) >= MIN_SUMMARY_TOKENS


def _after_summary(state: RunState, summary: TurnResult) -> Next:
    if state.spec.compaction is None or not state.spec.compaction.alone:
        return _further(state, summary=False)
    if summary.content.strip():
        return Finish("completed")
    return Finish("failed", fault=Fault("server_error", "the model wrote no summary", status=502))


def _cut(turn: TurnResult) -> str | None:
    """Return why a run cannot continue after a turn that was cut, or None if it can."""
    if turn.finish_reason == "stop" and turn.unfinished:
        return STOP_SEQUENCE
    return MAX_OUTPUT_TOKENS if turn.finish_reason == "length" or turn.unfinished else None


def runs_here(state: RunState, call: Call) -> bool:
    """Return whether the cluster answers this call: it runs the tool, or answers that there is no such tool."""
    if call.turn == 0:
        return True
    offer = state.offer(call.name)
    return is_ours(offer, state.spec.offers) and (offer is None or not offer.approval)


def starts_early(state: RunState, call: Call) -> bool:
    """Return whether a complete call of the turn that goes on is run at once."""
    offer = state.offer(call.name)
    if offer is None or not offer.starts_early or not runs_here(state, call) or state.summarising:
        return False
    return call.place not in state.early and state.tool_calls < state.spec.limits.tool_calls


def is_ours(offer: ToolOffer | None, offers: Iterable[ToolOffer]) -> bool:
    """Return whether calls of a tool are the cluster's to answer and not the client's.

    Args:
        offer: the tool; None: the model called a tool that does not exist. The cluster then says so, if it runs tools
            for this request at all.
        offers: all tools of the request.
    """
    return any(one.here for one in offers) if offer is None else offer.here


def _ask(state: RunState, summary: bool) -> Next:
    number, attempt = len(state.turns) + 1, state.attempt + 1
    if attempt > state.spec.limits.turn_attempts:
        return Finish("failed", fault=Fault("server_error", f"turn {number} was lost {attempt - 1} times", status=502))
    forced, asked = state.spec.tool_choices, sum(not turn.summary for turn in state.turns)
    choice = forced[asked] if asked < len(forced) else state.spec.tool_choice
    limits = state.spec.limits
    if state.spec.offers and (summary or number >= limits.turns or state.tool_calls >= limits.tool_calls):
        choice = NO_TOOL
    return AskTurn(number, attempt, choice, summary)


def _call(state: RunState, calls: tuple[Call, ...]) -> Next:
    sent = tuple(call for call in calls if call.place in state.sent)
    if sent:
        return CallTools(sent, resumed=True)
    room = max(0, state.spec.limits.tool_calls - state.tool_calls)
    refused = [_refusal(call, _unknown(state, call)) for call in calls if _unknown(state, call)]
    known = [call for call in calls if not _unknown(state, call)]
    limit = f"a run may call {state.spec.limits.tool_calls} tools, and has"
    # Calls that were started early count already.
    refused += [_refusal(call, limit) for call in [call for call in known if call.place not in state.early][room:]]
    return Refuse(tuple(refused)) if refused else CallTools(tuple(known), resumed=False)


def _unknown(state: RunState, call: Call) -> str:
    if call.turn == 0 or state.offer(call.name) is not None:
        return ""
    there_are = ", ".join(sorted(offer.name for offer in state.spec.offers))
    return f"there is no tool {call.name[:200]!r}; there are: {there_are}"


def _refusal(call: Call, why: str) -> ToolAnswer:
    return ToolAnswer(call.turn, call.index, Outcome.REFUSED, f"{Outcome.REFUSED}: {why}")
