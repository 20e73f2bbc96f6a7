"""The life of a program, told as timelines; then anything that may happen, in any order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import IllegalTransition
from cluster.lifecycle import (
    TRANSITIONS,
    Action,
    Admitted,
    Conclude,
    Decide,
    Ended,
    Event,
    FreeHold,
    Held,
    HoldEnded,
    Observe,
    Phase,
    ProgramState,
    Released,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnArrived,
    TurnEnded,
    begin,
    step,
)


def live(*events: Event) -> tuple[ProgramState, list[tuple[Action, ...]]]:
    state, log = begin("t/p", events[0].at_s), []
    for event in events:
        state, actions = step(state, event)
        log.append(actions)
    return state, log


def test_a_program_is_held_through_a_tool_call_and_its_hold_is_used() -> None:
    state, log = live(
        TurnArrived(0.0),
        Admitted(0.1),
        TurnEnded(1.0, ("ls",), served_tokens=100),
        Held(1.0, until_s=3.0, reason="ttl"),
        TurnArrived(2.5, last=True),
        Admitted(2.6),
        TurnEnded(3.0, (), served_tokens=20),
    )
    assert log == [
        (),
        (),
        (Decide(),),
        (),
        (Observe("ls", 1.5),),
        (FreeHold("used"),),
        (Conclude(turns=2, served_tokens=120),),
    ]
    assert (state.phase, state.turns, state.served_tokens, state.arrived_s) == (Phase.ENDED, 2, 120, 0.0)


def test_a_hold_that_expires_leaves_the_program_paused_and_its_pause_is_still_measured() -> None:
    state, log = live(
        TurnArrived(0.0),
        TurnEnded(1.0, ("pytest",), 10),
        Held(1.0, 2.0, "ttl"),
        HoldEnded(2.0, "expired"),
        TurnArrived(9.0),
    )
    assert log[3:] == [(FreeHold("expired"),), (Observe("pytest", 8.0),)]
    assert state.phase is Phase.RUNNING


def test_a_hold_broken_while_its_turn_waits_does_not_end_the_turn() -> None:
    state, log = live(
        TurnArrived(0.0),
        TurnEnded(1.0, ("ls",), 10),
        Held(1.0, 2.0, "ttl"),
        TurnArrived(1.5),
        HoldEnded(1.6, "broken"),
        Admitted(1.7),
    )
    assert log[4:] == [(FreeHold("broken"),), ()]
    assert (state.phase, state.active) == (Phase.RUNNING, 1)


def test_what_the_executor_says_is_measured_instead_of_the_gap() -> None:
    _, log = live(
        TurnArrived(0.0),
        TurnEnded(1.0, ("guess",), 10),
        Released(1.0, "policy"),
        ToolStarted(2.0, ("b", "a", "b")),
        ToolFinished(5.0),
        TurnArrived(6.0),
    )
    assert log[4:] == [(Observe("a+b", 3.0),), ()]


def test_parallel_turns_pause_the_program_only_when_the_last_one_ends() -> None:
    state, log = live(TurnArrived(0.0), TurnArrived(0.1), TurnEnded(1.0, ("x",), 5), TurnEnded(2.0, ("y",), 5))
    assert log == [(), (), (), (Decide(),)]
    assert (state.phase, state.tools, state.active) == (Phase.DECIDING, ("y",), 0)


def test_an_aborted_turn_gives_up_the_hold_it_waited_for() -> None:
    state, log = live(
        TurnArrived(0.0), TurnEnded(1.0, ("x",), 5), Held(1.0, 9.0, "ttl"), TurnArrived(2.0), TurnAborted(2.5)
    )
    assert log[-1] == (FreeHold("aborted"),)
    assert state.phase is Phase.RELEASED


def test_an_end_that_is_announced_while_a_turn_runs_waits_for_it() -> None:
    state, log = live(TurnArrived(0.0), Ended(0.5, "asked"), TurnEnded(1.0, ("x",), 5))
    assert log == [(), (), (Conclude(1, 5),)]
    assert state.phase is Phase.ENDED


def test_an_illegal_event_tells_the_story_and_changes_nothing() -> None:
    state, _ = live(TurnArrived(0.0), TurnEnded(1.0, ("ls",), 5), Held(1.0, 2.0, "ttl"))
    with pytest.raises(
        IllegalTransition, match=r"t/p: Admitted.*while held.*TurnEnded\(ls\) -> deciding; .*Held\(ttl\)"
    ):
        step(state, Admitted(1.5))


EVENTS = st.sampled_from(
    [
        TurnArrived(0.0),
        TurnArrived(0.0, last=True),
        Admitted(0.0),
        TurnEnded(0.0, ("x",), 1),
        TurnAborted(0.0),
        Held(0.0, 1.0, "r"),
        Released(0.0, "r"),
        HoldEnded(0.0, "r"),
        ToolStarted(0.0, ("x",)),
        ToolFinished(0.0),
        Ended(0.0, "r"),
    ]
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_holds_balance_and_turns_add_up(events: list[Event]) -> None:
    state, held, active, concluded = begin("t/p", 0.0), 0, 0, 0
    for event in events:
        # What the scheduler guarantees: nobody ends a turn that is not in flight, or one that was not admitted.
        if isinstance(event, TurnEnded | TurnAborted | Admitted) and not state.active:
            continue
        if isinstance(event, TurnEnded) and state.phase is Phase.RESUMING:
            continue
        if (state.phase, type(event)) not in TRANSITIONS:
            with pytest.raises(IllegalTransition):
                step(state, event)
            continue
        state, actions = step(state, event)
        active += isinstance(event, TurnArrived)
        active -= isinstance(event, TurnEnded | TurnAborted)
        held += isinstance(event, Held)
        held -= sum(isinstance(action, FreeHold) for action in actions)
        concluded += sum(isinstance(action, Conclude) for action in actions)
        assert state.active == active
        assert held == (state.phase in (Phase.HELD, Phase.RESUMING))
        assert (state.phase is Phase.DECIDING) == (Decide() in actions)
        assert concluded == (state.phase is Phase.ENDED)
