"""Timelines of runs: what the log says, and what comes next."""

from typing import Any

import pytest
from msgspec.structs import replace

from cluster.core.errors import IllegalTransition
from cluster.core.tools import ToolOffer
from cluster.core.turn import pack_ids, unpack_ids
from cluster.runs.events import (
    Accepted,
    Call,
    EarlyIntent,
    Ended,
    Generated,
    LateAnswer,
    Limits,
    RunEvent,
    RunSpec,
    TakenOver,
    ToolAnswer,
    ToolIntent,
    TurnIntent,
    TurnResult,
    decode,
    encode,
)
from cluster.runs.state import (
    AskTurn,
    AwaitLate,
    CallTools,
    Finish,
    Refuse,
    RunState,
    conversation,
    fold,
    next_step,
    worked_s,
)

LIMITS = Limits(turns=8, tool_calls=8, output_tokens=1000, wall_s=60.0, turn_attempts=2)
OFFERS = (ToolOffer("calc", {"name": "calc"}, here=True), ToolOffer("ask_user", {"name": "ask_user"}, here=False))
QUESTION = {"role": "user", "content": "what is 6 x 7?"}


def accepted(**fields: Any) -> Accepted:
    given = {"limits": LIMITS, "messages": (QUESTION,), "offers": OFFERS} | fields
    return Accepted(
        RunSpec(
            id="resp_1",
            api="responses",
            tenant="t",
            program="p",
            identity="{}",
            model="tiny",
            created_s=0.0,
            **given,
        )
    )


def result(turn: int, *calls: Call, content: str = "", finish: str = "stop", continued: bool = True) -> TurnResult:
    added, out = pack_ids([10 * turn, 10 * turn + 1]), pack_ids([10 * turn + 5])
    return TurnResult(turn, continued, "continued", added, out, finish, 10, 8, 5, 0.0, 1.0, content, calls=calls)


def call(turn: int, index: int = 0, name: str = "calc", arguments: str = "{}") -> Call:
    return Call(turn, index, f"call_{turn}_{index}", name, arguments)


def ok(turn: int, index: int = 0, text: str = "42", outcome: str = "ok") -> ToolAnswer:
    return ToolAnswer(turn, index, outcome, text)


def after(*events: RunEvent) -> RunState:
    state = fold(events)
    assert state is not None
    assert fold([decode(encode(event)) for event in events]) == state
    return state


def test_a_program_of_two_turns_and_one_tool() -> None:
    log: list[RunEvent] = [accepted()]
    assert next_step(after(*log)) == AskTurn(1, 1, None)
    log += [TurnIntent(1), Generated(1, "let me"), result(1, call(1), content="let me see")]
    assert next_step(after(*log)) == CallTools((call(1),), resumed=False)
    log += [ToolIntent(((1, 0),)), ok(1)]
    assert next_step(after(*log)) == AskTurn(2, 1, None)
    log += [TurnIntent(2), result(2, content="It is 42.")]
    state = after(*log)
    assert next_step(state) == Finish("completed")
    assert [message["role"] for message in state.messages] == ["user", "assistant", "tool", "assistant"]
    assert state.messages[2] == {"role": "tool", "tool_call_id": "call_1_0", "content": "42"}
    assert unpack_ids(state.token_ids) == [10, 11, 15, 20, 21, 25]
    assert (state.covered, state.output_tokens, state.tool_calls) == (4, 10, 1)
    assert next_step(after(*log, Ended("completed"))) is None


def test_a_turn_that_was_rendered_anew_forgets_the_ids_before() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1), TurnIntent(2)]
    assert unpack_ids(after(*log, result(2, continued=False)).token_ids) == [20, 21, 25]


def test_calls_of_one_turn_run_together_and_are_answered_in_their_order() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1, 0), call(1, 1))]
    assert next_step(after(*log)) == CallTools((call(1, 0), call(1, 1)), resumed=False)
    log += [ToolIntent(((1, 0), (1, 1))), ok(1, 1, "second")]
    assert next_step(after(*log)) == CallTools((call(1, 0),), resumed=True)
    log += [ok(1, 0, "first")]
    assert [message["content"] for message in after(*log).messages[2:]] == ["first", "second"]
    assert next_step(after(*log)) == AskTurn(2, 1, None)


def test_whoever_takes_over_says_that_a_call_may_have_been_sent() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), TakenOver("other")]
    assert next_step(after(*log)) == CallTools((call(1),), resumed=True)
    assert after(*log).runners == 2


def test_a_call_without_an_intent_in_the_log_was_never_sent() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1)), TakenOver("other")]
    assert next_step(after(*log)) == CallTools((call(1),), resumed=False)


def test_a_turn_that_was_lost_is_asked_again_so_often_and_then_fails() -> None:
    log = [accepted(), TurnIntent(1), Generated(1, "half a")]
    assert next_step(after(*log)) == AskTurn(1, 2, None)
    finish = next_step(after(*log, TurnIntent(1, attempt=2)))
    assert isinstance(finish, Finish) and finish.status == "failed" and finish.fault is not None
    assert finish.fault.message == "turn 1 was lost 2 times"


def test_the_caller_s_own_tools_end_the_run_after_ours_have_run() -> None:
    mine = call(1, 1, "ask_user")
    log = [accepted(), TurnIntent(1), result(1, call(1, 0), mine)]
    assert next_step(after(*log)) == CallTools((call(1, 0),), resumed=False)
    log += [ToolIntent(((1, 0),)), ok(1, 0)]
    state = after(*log)
    assert next_step(state) == Finish("completed")
    assert state.waiting == (mine,)
    assert [message["role"] for message in state.messages] == ["user", "assistant", "tool"]


def test_a_tool_that_nobody_offered_is_answered_with_those_that_there_are() -> None:
    todo = next_step(after(accepted(), TurnIntent(1), result(1, call(1, name="clac"))))
    assert isinstance(todo, Refuse)
    assert todo.answers[0].text == "refused: there is no tool 'clac'; there are: ask_user, calc"
    assert next_step(after(accepted(), TurnIntent(1), result(1, call(1, name="clac")), *todo.answers)) == AskTurn(
        2, 1, None
    )


def test_without_tools_of_ours_an_unknown_call_is_the_caller_s() -> None:
    log = [accepted(offers=OFFERS[1:]), TurnIntent(1), result(1, call(1, name="clac"))]
    assert next_step(after(*log)) == Finish("completed")


def test_a_call_that_needs_consent_ends_the_run_and_an_approved_one_begins_the_next() -> None:
    careful = (ToolOffer("rm", {"name": "rm"}, here=True, approval=True),)
    log = [accepted(offers=careful), TurnIntent(1), result(1, call(1, name="rm"))]
    state = after(*log)
    assert next_step(state) == Finish("completed")
    approved = Call(0, 0, "call_1_0", "rm", "{}")
    second = accepted(offers=careful, messages=conversation(state), approved=(approved,))
    assert next_step(after(second)) == CallTools((approved,), resumed=False)
    done = after(second, ToolIntent(((0, 0),)), ok(0))
    assert done.messages[-1] == {"role": "tool", "tool_call_id": "call_1_0", "content": "42"}
    assert next_step(done) == AskTurn(1, 1, None)


def test_the_model_goes_on_while_an_asynchronous_tool_works_and_is_told_its_answer() -> None:
    log = [
        accepted(),
        TurnIntent(1),
        result(1, call(1)),
        ToolIntent(((1, 0),)),
        ok(1, text="started", outcome="started"),
    ]
    assert next_step(after(*log)) == AskTurn(2, 1, None)
    log += [TurnIntent(2), result(2, content="meanwhile")]
    assert next_step(after(*log)) == AwaitLate()
    log += [LateAnswer(ok(1, text="42"))]
    assert next_step(after(*log)) == AskTurn(3, 1, None)
    told = after(*log, TurnIntent(3)).messages[-1]
    assert told == {"role": "user", "content": "[The call of calc that was started earlier has ended]\n42"}
    assert conversation(after(*log))[-1] == told
    assert next_step(after(*log, TurnIntent(3), result(3, content="done"))) == Finish("completed")


def test_the_last_turn_that_a_bound_allows_has_no_tools() -> None:
    limits = Limits(turns=2, tool_calls=8, output_tokens=1000, wall_s=60.0, turn_attempts=2)
    log = [accepted(limits=limits), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1)]
    assert next_step(after(*log)) == AskTurn(2, 1, "none")
    log += [TurnIntent(2), result(2, call(2))]
    todo = next_step(after(*log))
    assert todo == CallTools((call(2),), resumed=False)  # a model may call one all the same
    assert next_step(after(*log, ToolIntent(((2, 0),)), ok(2))) == Finish("incomplete", "max_turns")


def test_calls_above_the_bound_are_refused_and_the_next_turn_has_no_tools() -> None:
    limits = Limits(turns=8, tool_calls=1, output_tokens=1000, wall_s=60.0, turn_attempts=2)
    log = [accepted(limits=limits), TurnIntent(1), result(1, call(1, 0), call(1, 1))]
    todo = next_step(after(*log))
    assert todo == Refuse((ToolAnswer(1, 1, "refused", "refused: a run may call 1 tools, and has"),))
    log += todo.answers
    assert next_step(after(*log)) == CallTools((call(1, 0),), resumed=False)
    log += [ToolIntent(((1, 0),)), ok(1, 0)]
    assert next_step(after(*log)) == AskTurn(2, 1, "none")


def test_a_call_that_started_early_is_no_more_refused() -> None:
    limits = Limits(turns=8, tool_calls=1, output_tokens=1000, wall_s=60.0, turn_attempts=2)
    log = [accepted(limits=limits), TurnIntent(1), EarlyIntent(call(1, 1), 1), result(1, call(1, 0), call(1, 1))]
    todo = next_step(after(*log))
    assert isinstance(todo, Refuse)
    assert [answer.place for answer in todo.answers] == [(1, 0)]
    assert next_step(after(*log, *todo.answers)) == CallTools((call(1, 1),), resumed=False)
    # Calls that others leave room for run.
    limits = replace(limits, tool_calls=2)
    log = [accepted(limits=limits), *log[1:-1], result(1, call(1, 0), call(1, 1))]
    assert next_step(after(*log)) == CallTools((call(1, 0), call(1, 1)), resumed=False)


def test_tokens_bound_the_run() -> None:
    limits = Limits(turns=8, tool_calls=8, output_tokens=5, wall_s=60.0, turn_attempts=2)
    log = [accepted(limits=limits), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1)]
    assert next_step(after(*log)) == Finish("incomplete", "max_output_tokens")
    cut = after(accepted(), TurnIntent(1), result(1, finish="length"))
    assert next_step(cut) == Finish("incomplete", "max_output_tokens")


def test_forced_choices_apply_to_the_first_turns() -> None:
    first = {"type": "function", "function": {"name": "calc"}}
    spec = accepted(tool_choices=(first,), tool_choice="auto")
    assert next_step(after(spec)) == AskTurn(1, 1, first)
    log = [spec, TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1)]
    assert next_step(after(*log)) == AskTurn(2, 1, "auto")


def test_a_log_tells_how_long_was_worked_on_it() -> None:
    turn = TurnIntent(1)
    calls = [replace(ok(1), queue_s=0.5, run_s=2.0), replace(ok(1, 1), run_s=1.0)]
    first = [accepted(), turn, replace(result(1, call(1), call(1, 1)), began_s=1.0, ended_s=3.0), *calls]
    assert [worked_s(first[:count]) for count in (1, 2, 3, 4, 5)] == [0.0, 0.0, 3.0, 5.5, 5.5]
    later = [TakenOver("b", after_s=7.0), replace(result(2), began_s=0.5, ended_s=4.0)]
    assert worked_s([*first, *later]) == 11.0
    assert worked_s([*first, TakenOver("b")]) == 5.5, "of a log that does not say so"


def test_a_log_that_is_none() -> None:
    assert fold([]) is None
    with pytest.raises(IllegalTransition, match="begins with TurnIntent"):
        fold([TurnIntent(1)])
    with pytest.raises(IllegalTransition, match="after its end"):
        fold([accepted(), Ended("completed"), TurnIntent(1)])
    with pytest.raises(IllegalTransition, match="accepted twice"):
        fold([accepted(), accepted()])


# --- answers that do not fit into the context -------------------------------------------------------------------------

LONG = "a" * 400 + "b" * 400


def cut_to(chars: int, turn: int, *calls: Call) -> TurnResult:
    """A turn whose prompt had so much of each longer answer."""
    return replace(result(turn, *calls), answer_chars=chars)


def texts(state: RunState) -> list[str]:
    return [message["content"] for message in state.messages]


def test_a_turn_s_long_answers_are_remembered_as_it_has_read_them() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1, 0), call(1, 1)), ToolIntent(((1, 0), (1, 1)))]
    log += [ok(1, 0, LONG), ok(1, 1, "short")]
    assert after(*log).unread == (2, 3)
    log += [TurnIntent(2)]
    assert texts(after(*log))[2] == LONG, "a turn that is tried again gets the whole answer"
    log += [cut_to(200, 2, call(2))]
    state = after(*log)
    assert texts(state)[3] == "short"
    note = "[... 600 characters of this answer were left out, because it does not fit in the model's context ...]"
    assert texts(state)[2] == "a" * 100 + f"\n{note}\n" + "b" * 100
    assert state.answers[1, 0].text == LONG, "who asks for the answer gets it whole"
    assert state.unread == ()


def test_answers_that_a_turn_has_read_are_never_cut_again() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1, 0, LONG)]
    log += [TurnIntent(2), result(2, call(2)), ToolIntent(((2, 0),)), ok(2, 0, "b" * 900)]
    assert after(*log).unread == (4,)
    state = after(*log, TurnIntent(3), cut_to(300, 3))
    assert texts(state)[2] == LONG
    assert "600 characters of this answer were left out" in texts(state)[4]


def test_a_late_answer_is_cut_as_any_other() -> None:
    log = [accepted(), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1, outcome="started", text="on it")]
    log += [LateAnswer(ok(1, text=LONG)), TurnIntent(2)]
    assert after(*log).unread == (2, 3)
    assert "characters of this answer were left out" in texts(after(*log, cut_to(200, 2)))[3]


def test_a_continued_run_may_cut_the_answers_that_the_one_before_has_left() -> None:
    messages = (QUESTION, {"role": "assistant", "content": ""}, {"role": "tool", "tool_call_id": "c", "content": LONG})
    log = [accepted(messages=messages, unread=(2,)), TurnIntent(1)]
    assert after(*log).unread == (2,)
    assert "characters of this answer" in texts(after(*log, cut_to(200, 1)))[2]
