"""Timelines of programs as a door sees them: given these turns, expect these contexts and this to be learnt."""

from itertools import chain
from typing import Any

import pytest

from cluster.core.program import USER_REPLY
from predictor_service.live_context import shown
from predictor_service.live_history import Arrived, LiveHistory
from predictor_service.model import NO_TOOL, Observation, PauseSeen, ProgramSeen, TurnContext, TurnSeen

USER = {"role": "user", "content": "u" * 40}
SAID = {"role": "assistant", "content": "a" * 8}
RESULT = {"role": "tool", "content": "r" * 80}


def call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def arrives(messages: list[dict[str, Any]], *, key: str = "t/p", **more: Any) -> Arrived:
    chars = sum(len(one["content"]) for one in messages)
    return Arrived(key, shown({"messages": messages}), "t", chars // 4, **more)


class Door:
    """A history, and what has come of it."""

    def __init__(self, **bounds: Any) -> None:
        self.history = LiveHistory(**({"max_programs": 100, "idle_s": 1000.0} | bounds))
        self.seen: list[Observation] = []

    def turn(
        self, arrived: Arrived, at_s: float, until_s: float, output: int | None, *, refused: bool = False
    ) -> TurnContext:
        context, news = self.history.arrived(arrived, at_s)
        self.seen += news
        self.seen += self.history.ended(arrived, context, until_s, output_tokens=output, refused=refused)
        return context

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.seen if isinstance(one, kind)]


def test_what_a_turn_called_is_learnt_when_the_next_one_comes() -> None:
    door = Door()
    first = door.turn(arrives([USER]), 10.0, 11.0, output=7)
    assert door.seen == []
    second = door.turn(arrives([USER, call("look"), RESULT]), 14.5, 15.0, output=5)
    turn, pause = door.of(TurnSeen)[0], door.of(PauseSeen)[0]
    assert (turn.turn, turn.outcome.output_tokens, turn.outcome.tool, turn.outcome.last) == (first, 7, "look", False)
    assert (pause.pause.tool, pause.outcome.duration_s, pause.outcome.returned_tokens) == ("look", 3.5, 20)
    assert (second.position, second.outputs, second.tools) == (1, (7,), ("look",))
    assert (second.durations_s, second.returned, second.new_tokens) == ((3.5,), (20,), 20)


def test_the_client_s_word_on_the_tool_comes_first() -> None:
    door = Door()
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives([USER, call("bash"), RESULT], last_tool="bash:make"), 2.0, 3.0, output=7)
    assert door.of(PauseSeen)[0].pause.tool == "bash:make"


def test_a_turn_that_called_nothing_and_was_not_the_last_waited_for_its_user() -> None:
    door = Door()
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives([USER, SAID, USER]), 61.0, 62.0, output=7)
    assert door.of(TurnSeen)[0].outcome.tool == USER_REPLY
    assert door.of(PauseSeen)[0].outcome.duration_s == 60.0


def test_at_a_program_s_end_what_was_ahead_of_each_turn_is_learnt() -> None:
    door = Door()
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives([USER, call("look"), RESULT], last=True), 2.0, 3.0, output=5)
    assert door.of(TurnSeen)[-1].outcome.last
    assert door.of(TurnSeen)[-1].outcome.tool == NO_TOOL
    ended = door.of(ProgramSeen)[0]
    assert list(ended.remaining) == [(20 + 5, 1), (0, 0)]
    assert [one.position for one in ended.turns] == [0, 1]
    assert all(one.text == "" for one in ended.turns)
    assert len(door.history) == 0


def test_of_a_long_program_the_first_turns_are_kept_and_all_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its later turns computes the 20 tokens of a result and its output."""
    monkeypatch.setattr("predictor_service.live_history.MAX_TURNS", 2)
    door = Door()
    messages = [USER]
    for number in range(5):
        door.turn(arrives(messages, last=number == 4), 10.0 * number, 10.0 * number + 1.0, output=5 + number)
        messages = [*messages, call("look"), RESULT]
    ended = door.of(ProgramSeen)[0]
    assert [one.position for one in ended.turns] == [0, 1]
    assert list(ended.remaining) == [(26 + 27 + 28 + 29, 4), (27 + 28 + 29, 3)]


@pytest.mark.parametrize("missing", [1, 3])
def test_a_program_is_not_learnt_if_one_of_its_turns_is_missing(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    """It has been served by another process, before or after the bound on the turns that are kept."""
    monkeypatch.setattr("predictor_service.live_history.MAX_TURNS", 2)
    door = Door()
    messages = [USER]
    for number in range(5):
        if number != missing:
            door.turn(arrives(messages, last=number == 4), 10.0 * number, 10.0 * number + 1.0, output=5)
        messages = [*messages, call("look"), RESULT]
    assert door.of(TurnSeen)[-1].outcome.last
    assert door.of(ProgramSeen) == []


def test_a_program_ends_when_somebody_says_so_or_when_it_is_idle_or_when_there_is_no_room() -> None:
    door = Door(max_programs=2, idle_s=100.0)
    for number, key in enumerate(("t/a", "t/b", "t/c")):
        door.turn(arrives([USER], key=key), number, number + 0.5, output=1)
    assert len(door.of(ProgramSeen)) == 1
    assert len(door.history.program_ended("t/b")) == 2
    assert list(door.history.sweep(50.0)) == []
    assert [len(news) for news in door.history.sweep(200.0)] == [2]
    assert len(door.history) == 0


def test_a_program_that_has_a_turn_during_a_sweep_goes_on() -> None:
    door = Door(idle_s=100.0)
    for key in ("t/a", "t/b", "t/c"):
        door.turn(arrives([USER], key=key), 0.0, 1.0, output=1)
    sweep = door.history.sweep(200.0)
    assert len(next(sweep)) == 2
    door.turn(arrives([USER], key="t/b"), 200.0, 201.0, output=1)
    assert list(sweep) == []
    assert len(door.history) == 2
    assert [len(news) for news in door.history.sweep(202.0)] == [2], "the sweep after it finds the last one"
    assert len(door.history) == 1


def test_where_other_processes_serve_turns_an_idle_program_teaches_no_end() -> None:
    """Its next turn may have gone to another process."""
    door = Door(max_programs=1, idle_s=100.0, alone=False)
    for key in ("t/a", "t/b"):
        door.turn(arrives([USER], key=key), 0.0, 1.0, output=7)
    assert [*chain(*door.history.sweep(200.0))] == door.seen == []
    assert len(door.history) == 0


@pytest.mark.parametrize("by_run", [False, True])
def test_where_other_processes_serve_turns_a_declared_end_is_learnt(by_run: bool) -> None:
    door = Door(alone=False)
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives([USER, call("look"), RESULT], last=not by_run), 2.0, 3.0, output=5)
    door.seen += door.history.program_ended("t/p")
    assert [(one.outcome.tool, one.outcome.last) for one in door.of(TurnSeen)] == [("look", False), (NO_TOOL, True)]
    assert [list(one.remaining) for one in door.of(ProgramSeen)] == [[(20 + 5, 1), (0, 0)]]


REST = [call("look"), RESULT]


@pytest.mark.parametrize(
    "turns",
    [
        [arrives([USER, *REST], last=True)],
        [arrives([USER]), arrives([USER, *REST, *REST], last=True)],
        [arrives([USER]), arrives([USER], last=True)],
        [Arrived("t/p", shown({"prompt": "u" * 40}), "t", 10, last=True)],
    ],
    ids=[
        "its beginning is missing",
        "a turn is missing",
        "a summary does not show the turns before it",
        "a prompt does not show earlier turns",
    ],
)
def test_of_a_program_with_turns_elsewhere_only_the_last_turn_is_learnt(turns: list[Arrived]) -> None:
    door = Door(alone=False)
    for at_s, turn in enumerate(turns):
        door.turn(turn, at_s, at_s + 0.5, output=5)
    assert [one.outcome.last for one in door.of(TurnSeen)] == [True]
    assert door.of(ProgramSeen) == []


def test_a_last_turn_that_failed_may_be_repeated_elsewhere() -> None:
    door = Door(alone=False)
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives([USER, *REST], last=True), 2.0, 3.0, output=None)
    assert door.of(ProgramSeen) == []


def pauses(*requests: list[dict[str, Any]]) -> list[tuple[str, float | None]]:
    """Let these requests of one program arrive every 10 s, each answered within 1 s. Return the pauses learnt."""
    door = Door()
    for number, messages in enumerate(requests):
        door.turn(arrives(messages), 10.0 * number, 10.0 * number + 1.0, output=7)
    assert [one.outcome.tool for one in door.of(TurnSeen)] == [one.pause.tool for one in door.of(PauseSeen)]
    return [(one.pause.tool, one.outcome.duration_s) for one in door.of(PauseSeen)]


LOOKED = [USER, call("look"), RESULT]
EDITED = [*LOOKED, call("edit"), RESULT]
MADE = [*EDITED, call("make"), RESULT]


def test_a_request_that_is_repeated_teaches_nothing_of_its_discarded_answer() -> None:
    """Its latest call is one of an earlier turn, whose pause has been learnt already."""
    assert pauses([USER], LOOKED, LOOKED, EDITED) == [("look", 9.0), ("edit", 9.0)]
    assert pauses([USER], [USER], LOOKED) == [("look", 9.0)]
    polled = [*LOOKED, *LOOKED[1:]]
    assert pauses([USER], LOOKED, polled, polled) == [("look", 9.0), ("look", 9.0)]


def test_turns_in_between_that_were_served_elsewhere_are_noticed_though_their_calls_are_alike() -> None:
    assert pauses(LOOKED, [*LOOKED, *LOOKED[1:], call("edit"), RESULT]) == []


def test_a_client_that_goes_back_teaches_nothing_of_the_answers_that_it_drops() -> None:
    assert pauses([USER], LOOKED, EDITED, MADE, LOOKED, EDITED) == [
        ("look", 9.0),
        ("edit", 9.0),
        ("make", 9.0),
        ("edit", 9.0),
    ]


@pytest.mark.parametrize("summary", [[USER], [USER, SAID, USER], [USER, SAID, USER, SAID, USER]])
def test_a_summary_of_the_history_teaches_nothing_and_what_follows_it_does(summary: list[dict[str, Any]]) -> None:
    known = [("look", 9.0), ("edit", 9.0)]
    assert pauses([USER], LOOKED, EDITED, summary) == known
    assert pauses([USER], LOOKED, EDITED, summary, [*summary, call("make"), RESULT]) == [*known, ("make", 9.0)]


def test_a_client_that_drops_its_oldest_turns_teaches_its_calls() -> None:
    names = ("look", "edit", "make", "test")
    turns = [part for name in names for part in (call(name), RESULT)]
    cut = [[USER, *turns[max(0, 2 * number - 4) : 2 * number]] for number in range(5)]
    assert pauses(*cut) == [(name, 9.0) for name in names]
    assert pauses(*cut, cut[-1], cut[-1]) == [(name, 9.0) for name in names]


def test_parallel_calls_are_those_of_one_turn() -> None:
    both = {**call("look"), "tool_calls": call("look")["tool_calls"] + call("edit")["tool_calls"]}
    assert pauses([USER], [USER, both, RESULT, RESULT]) == [("edit+look", 9.0)]
    again = [USER, both, RESULT, RESULT, call("make"), RESULT]
    assert pauses([USER], again[:4], again[:4], again) == [("edit+look", 9.0), ("make", 9.0)]
    single = [USER, call("look"), call("edit"), RESULT, RESULT]
    assert pauses([USER], single, [*single, call("make"), RESULT]) == [("edit+look", 9.0), ("make", 9.0)]


def test_a_failed_turn_teaches_nothing() -> None:
    door = Door()
    door.turn(arrives([USER]), 0.0, 1.0, output=None)
    door.turn(arrives([USER], last=True), 2.0, 3.0, output=9)
    assert [one.outcome.output_tokens for one in door.of(TurnSeen)] == [9]


def test_a_program_whose_last_turn_failed_may_have_had_more_work() -> None:
    """As one whose client gave up under overload."""
    door = Door()
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives(LOOKED), 2.0, 3.0, output=None)
    door.seen += chain(*door.history.sweep(2000.0))
    assert len(door.history) == 0
    assert [(one.outcome.tool, one.outcome.last) for one in door.of(TurnSeen)] == [("look", False)]
    assert door.of(ProgramSeen) == []


@pytest.mark.parametrize("by", ["its bound", "its end"])
def test_a_program_that_is_forgotten_during_a_turn_has_more_work(by: str) -> None:
    door = Door(max_programs=1)
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.history.arrived(arrives(LOOKED), 2.0)
    if by == "its end":
        door.seen += door.history.program_ended("t/p")
    else:
        door.turn(arrives([USER], key="t/other"), 3.0, 4.0, output=None)
    assert door.of(ProgramSeen) == []


@pytest.mark.parametrize("alone", [False, True])
def test_a_turn_that_was_refused_is_no_work_of_its_program(alone: bool) -> None:
    """As one whose context has become too long: its client ends, or goes on with a shorter one."""
    door = Door(alone=alone)
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    door.turn(arrives([*LOOKED, RESULT]), 2.0, 3.0, output=None, refused=True)
    again = door.turn(arrives(LOOKED), 4.0, 5.0, output=5)
    door.turn(arrives(EDITED), 6.0, 7.0, output=None, refused=True)
    assert again.position == 1
    door.seen += door.history.program_ended("t/p")
    assert [list(one.remaining) for one in door.of(ProgramSeen)] == [[(20 + 5, 1), (0, 0)]]


def test_turns_that_were_seen_elsewhere_are_estimated_and_not_learnt_from() -> None:
    door = Door()
    door.turn(arrives([USER]), 0.0, 1.0, output=7)
    rest = [call("look"), RESULT] * 3
    context = door.turn(arrives([USER, *rest], last=True), 9.0, 10.0, output=5)
    assert context.position == 3
    assert context.tools[1:] == ("look", "look")
    assert door.of(PauseSeen) == []
    assert door.of(ProgramSeen) == []


def test_how_long_a_token_is_is_learnt_from_exact_counts() -> None:
    history = LiveHistory(10, 100.0)
    for number in range(200):
        turn = arrives([USER], key=f"t/{number}")
        context, _ = history.arrived(turn, 0.0)
        history.ended(turn, context, 1.0, output_tokens=1, prompt_tokens=20)
    context, _ = history.arrived(arrives([USER, SAID, RESULT], key="t/x"), 0.0)
    assert context.new_tokens == pytest.approx(40, abs=1)
    assert context.outputs == (4,)


def test_turns_of_one_program_at_the_same_time_do_no_harm() -> None:
    history = LiveHistory(10, 100.0)
    one, two = arrives([USER]), arrives([USER])
    first, _ = history.arrived(one, 0.0)
    second, _ = history.arrived(two, 0.0)
    history.ended(one, first, 1.0, output_tokens=3)
    history.ended(two, second, 1.5, output_tokens=4)
    context, news = history.arrived(arrives([USER, call("look"), RESULT]), 2.0)
    assert context.outputs == (4, 3)
    assert [one.outcome.output_tokens for one in news if isinstance(one, TurnSeen)] == [4]


def test_a_turn_of_no_program_has_a_context_and_is_not_remembered() -> None:
    history = LiveHistory(10, 100.0)
    assert history.single(arrives([USER], key="")).prompt_tokens == 10
    assert len(history) == 0
