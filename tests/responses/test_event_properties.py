"""Of every log: all readers number alike, wherever they begin; and the response is what its events say."""

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.core.tools import Outcome
from cluster.core.turn import CallDelta
from cluster.responses.events import ResponseFold
from cluster.runs.events import (
    Accepted,
    Ended,
    Generated,
    LateAnswer,
    TakenOver,
    ToolAnswer,
    ToolIntent,
    TurnIntent,
    decode,
    encode,
)
from cluster.runs.state import AskTurn, AwaitLate, CallTools, Finish, Refuse, begin, is_ours, next_step, step
from tests.responses.run_logs import LIMITS, call, offer, piece, result, spec
from tests.responses.test_input_items import DOCS, run_of

EVENTS = TypeAdapter(ResponseStreamEvent)
OFFERS = (
    offer("look"),
    offer("clock", here=True),
    offer("read", server="docs"),
    offer("write", server="docs", approval=True),
)
NAMES = [*(one.name for one in OFFERS), "nobody_offered_it"]
TEXTS = st.text("ab é", max_size=6)


@st.composite
def logs(draw):
    """What a run that follows `next_step` may write."""
    approved = tuple(call("docs__write", turn=0, index=n) for n in range(draw(st.integers(0, 2))))
    log = [
        Accepted(
            spec(
                *OFFERS,
                approved=approved,
                background=draw(st.booleans()),
                echo={"told_servers": draw(st.sampled_from([[], ["docs"]])), "approvals": ["r"] * len(approved)},
            )
        )
    ]
    state = begin(log[0])
    while (todo := next_step(state)) is not None:
        log += _entries(draw, state, todo)
        state = begin(log[0])
        for entry in log[1:]:
            state = step(state, entry)
    return log


def _entries(draw, state, todo):
    if draw(st.integers(0, 19)) == 0:
        return [Ended(draw(st.sampled_from(["cancelled", "failed"])), at_s=101.0)]
    taken = [TakenOver("r2")] if draw(st.integers(0, 9)) == 0 else []
    match todo:
        case AskTurn():
            return [*taken, TurnIntent(todo.turn, todo.attempt), *_turn(draw, todo.turn)]
        case CallTools():
            intent = [] if todo.resumed else [ToolIntent(tuple(one.place for one in todo.calls))]
            return [*intent, *taken, *(_answer(draw, one) for one in todo.calls)]
        case Refuse():
            return list(todo.answers)
        case AwaitLate():
            return [LateAnswer(ToolAnswer(*state.late[0], Outcome.OK, draw(TEXTS)))]
        case Finish():
            return [Ended(todo.status, todo.reason, todo.fault, 101.0)]


def _answer(draw, one):
    outcomes = [outcome for outcome in Outcome if outcome is not Outcome.STARTED or one.name == "clock"]
    return ToolAnswer(one.turn, one.index, draw(st.sampled_from(outcomes)), draw(TEXTS))


def _turn(draw, number):
    """Pieces, and mostly a result; some pieces are missing, and some say something else."""
    content, reasoning = draw(TEXTS), draw(TEXTS)
    wanted = draw(st.lists(st.tuples(st.sampled_from(NAMES), TEXTS), max_size=2))
    calls = tuple(call(name, text, number, index) for index, (name, text) in enumerate(wanted))
    pieces = []
    for text in (reasoning, content):
        cut = draw(st.integers(0, len(text)))
        pieces += [Generated(number, reasoning=text[:cut])] if text is reasoning else [Generated(number, text[:cut])]
    pieces += [Generated(number, calls=(piece(one),)) for one in calls if draw(st.booleans())]
    if draw(st.integers(0, 5)) == 0:
        pieces.append(Generated(number, "?", calls=(CallDelta(0, "x", "look", "{"),)))
    if draw(st.integers(0, 4)) == 0:
        return pieces
    finish = draw(st.sampled_from(["stop", "length"]))
    return [*pieces, result(number, content, *calls, reasoning=reasoning, finish=finish)]


def read(log):
    reader = ResponseFold()
    return [reader.feed(entry) for entry in log], reader


@given(logs(), st.data())
@settings(max_examples=150, deadline=None)
def test_all_readers_number_alike(log, data) -> None:
    at = data.draw(st.integers(1, len(log)))
    whole, reader = read(log)
    first, resumed = read([decode(encode(entry)) for entry in log[:at]])
    rest = [resumed.feed(entry) for entry in log[at:]]
    assert first + rest == whole
    assert resumed.response == reader.response


@given(logs())
@settings(max_examples=150, deadline=None)
def test_every_event_is_openais_and_the_numbers_have_no_gap(log) -> None:
    events = [event for told in read(log)[0] for event in told]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        assert type(event) is type(EVENTS.validate_json(event.to_json(), strict=True))


@given(logs())
@settings(max_examples=150, deadline=None)
def test_a_client_that_adds_the_events_up_has_the_response(log) -> None:
    told, reader = read(log)
    open_items, texts, done = {}, {}, {}
    for event in (event for entry in told for event in entry):
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert event.output_index == len(texts)
            open_items[event.output_index] = event.item.id
            texts[event.output_index] = ""
        elif kind == "output_item.done":
            assert open_items.pop(event.output_index) == event.item.id
            done[event.output_index] = event.item
        elif hasattr(event, "output_index"):
            assert open_items[event.output_index] == event.item_id
            texts[event.output_index] += getattr(event, "delta", "")
    response = reader.response
    assert not open_items
    left_out = reader.replaced if reader.state.ended else ()
    kept = [index for index, item in done.items() if item.id not in left_out]
    assert sorted(item.id for item in response.output) == sorted(done[index].id for index in kept)
    for index, item in zip(sorted(kept), response.output, strict=True):
        assert _text(item) in ("", texts[index])
        if item.type in ("function_call", "mcp_approval_request"):
            # What the caller acts on is never taken back.
            assert done[index] == item


def _text(item):
    match item.type:
        case "message" | "reasoning":
            return item.content[0].text if item.content else ""
        case "function_call" | "mcp_call":
            return item.arguments
    return ""


@given(logs())
@settings(max_examples=150, deadline=None)
def test_the_output_of_a_completed_response_is_what_happened(log) -> None:
    """It has each turn's text once, and no call that the conversation does not have: it can be sent back as input."""
    _, reader = read(log)
    state, output = reader.state, reader.response.output
    if state.ended.status != "completed":
        return
    assert "".join(_text(item) for item in output if item.type == "message") == "".join(
        turn.content for turn in state.turns
    )
    calls = {call.id for turn in state.turns for call in turn.calls}
    assert {item.call_id for item in output if item.type == "function_call"} <= calls


@given(logs())
@settings(max_examples=150, deadline=None)
def test_the_callers_calls_of_the_last_turn_are_complete_in_the_output(log) -> None:
    _, reader = read(log)
    state = reader.state
    assert state.spec.limits == LIMITS
    shown = {item.call_id for item in reader.response.output if item.type == "function_call" and _complete(item)}
    consent = [item for item in reader.response.output if item.type == "mcp_approval_request"]
    for one in state.waiting:
        named = state.offer(one.name)
        if one.turn and not is_ours(named, state.spec.offers):
            assert one.id in shown
        if named is not None and named.approval and one.turn:
            assert any(item.arguments == one.arguments for item in consent)


def _complete(item):
    return item.status == "completed"


@given(logs())
@settings(max_examples=150, deadline=None)
def test_the_output_of_a_completed_response_is_accepted_as_input(log) -> None:
    """Also after attempts that were lost. Each call that is the client's gets an output, as the client would send it.

    The input has each turn's text once, and each call once.
    """
    _, reader = read(log)
    state = reader.state
    if state.ended.status != "completed":
        return
    sent = [item.model_dump(mode="json", exclude_none=True) for item in reader.response.output]
    waiting = [item["call_id"] for item in sent if item["type"] == "function_call"]
    sent += [{"type": "function_call_output", "call_id": one, "output": "found"} for one in waiting]
    approvals = [item["id"] for item in sent if item["type"] == "mcp_approval_request"]
    sent += [{"type": "mcp_approval_response", "approval_request_id": one, "approve": False} for one in approvals]
    messages = run_of({"role": "user", "content": "go"}, *sent, tools=[DOCS]).messages
    texts = [one.get("content") or "" for one in messages if one["role"] == "assistant"]
    assert "".join(texts) == "".join(turn.content for turn in state.turns)
    calls = [one["id"] for message in messages for one in message.get("tool_calls", ())]
    assert len(calls) == len(set(calls))
