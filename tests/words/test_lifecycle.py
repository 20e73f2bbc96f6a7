"""The life of a program, told as timelines; then anything that may happen, in any order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import IllegalTransition
from cluster.core.lifecycle.events import (
    Action,
    Admitted,
    CancelFetch,
    Conclude,
    CopyLost,
    Decide,
    Ended,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    FreeHold,
    Held,
    HoldEnded,
    LoadFailure,
    Observe,
    PauseReason,
    Released,
    ReleaseReason,
    Swapped,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnArrived,
    TurnEnded,
)
from cluster.core.lifecycle.machine import TRANSITIONS, Phase, ProgramState, begin, step


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
        Held(1.0, until_s=3.0, reason=PauseReason.TTL),
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
        (FreeHold(ReleaseReason.USED),),
        (Conclude(turns=2, served_tokens=120),),
    ]
    assert (state.phase, state.turns, state.served_tokens, state.arrived_s) == (Phase.ENDED, 2, 120, 0.0)


def test_a_hold_that_expires_leaves_the_program_paused_and_its_pause_is_still_measured() -> None:
    state, log = live(
        TurnArrived(0.0),
        TurnEnded(1.0, ("pytest",), 10),
        Held(1.0, 2.0, PauseReason.TTL),
        HoldEnded(2.0, ReleaseReason.EXPIRED),
        TurnArrived(9.0),
    )
    assert log[3:] == [(FreeHold(ReleaseReason.EXPIRED),), (Observe("pytest", 8.0),)]
    assert state.phase is Phase.RUNNING


def test_a_hold_broken_while_its_turn_waits_does_not_end_the_turn() -> None:
    state, log = live(
        TurnArrived(0.0),
        TurnEnded(1.0, ("ls",), 10),
        Held(1.0, 2.0, PauseReason.TTL),
        TurnArrived(1.5),
        HoldEnded(1.6, ReleaseReason.BROKEN_WAITING),
        Admitted(1.7),
    )
    assert log[4:] == [(FreeHold(ReleaseReason.BROKEN_WAITING),), ()]
    assert (state.phase, state.active) == (Phase.RUNNING, 1)


def test_what_the_executor_says_is_measured_instead_of_the_gap() -> None:
    _, log = live(
        TurnArrived(0.0),
        TurnEnded(1.0, ("guess",), 10),
        Released(1.0, PauseReason.POLICY),
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
        TurnArrived(0.0), TurnEnded(1.0, ("x",), 5), Held(1.0, 9.0, PauseReason.TTL), TurnArrived(2.0), TurnAborted(2.5)
    )
    assert log[-1] == (FreeHold(ReleaseReason.ABORTED),)
    assert state.phase is Phase.RELEASED


def test_an_end_that_is_announced_while_a_turn_runs_waits_for_it() -> None:
    state, log = live(TurnArrived(0.0), Ended(0.5, ReleaseReason.ASKED), TurnEnded(1.0, ("x",), 5))
    assert log == [(), (), (Conclude(1, 5),)]
    assert state.phase is Phase.ENDED


PAUSED = (TurnArrived(0.0), TurnEnded(1.0, ("ls",), 5))


def test_a_swapped_program_is_fetched_when_its_tool_has_finished_and_resumes_from_the_hold() -> None:
    state, log = live(
        *PAUSED,
        Swapped(1.0, PauseReason.DOES_NOT_PAY),
        ToolStarted(1.5, ("ls",)),
        ToolFinished(4.5),
        Fetched(4.6, until_s=14.6),
        TurnArrived(4.7),
        Admitted(4.8),
    )
    assert log[1:] == [(Decide(),), (), (), (Observe("ls", 3.0), Fetch()), (), (), (FreeHold(ReleaseReason.USED),)]
    assert state.phase is Phase.RUNNING


def test_a_turn_that_comes_while_its_context_is_fetched_waits_for_that() -> None:
    state, log = live(
        *PAUSED, Swapped(1.0, PauseReason.POLICY), ToolFinished(2.0), TurnArrived(2.1), Fetched(2.2, 12.2)
    )
    assert (state.phase, state.active) == (Phase.RESUMING, 1)
    _, actions = step(state, Admitted(2.3))
    assert actions == (FreeHold(ReleaseReason.USED),)
    assert log[4:] == [(), ()]


def test_a_turn_that_finds_its_program_swapped_loads_by_itself() -> None:
    state, log = live(*PAUSED, Swapped(1.0, PauseReason.POLICY), TurnArrived(3.0), Admitted(3.1))
    assert (state.phase, log[3:]) == (Phase.RUNNING, [(Observe("ls", 2.0),), ()])


def test_a_hold_that_is_swapped_gives_its_blocks_back() -> None:
    state, log = live(*PAUSED, Held(1.0, 9.0, PauseReason.TTL), Swapped(2.0, PauseReason.POLICY))
    assert (state.phase, log[-1]) == (Phase.SWAPPED, (FreeHold(ReleaseReason.SWAPPED),))


def test_a_fetch_that_fails_leaves_the_copy_and_may_be_tried_again() -> None:
    swapped = (*PAUSED, Swapped(1.0, PauseReason.POLICY), ToolFinished(2.0), FetchFailed(2.1, LoadFailure.NO_MEMORY))
    state, log = live(*swapped, ToolFinished(3.0))
    assert (state.phase, log[-1]) == (Phase.FETCHING, (Fetch(),))
    state, _ = live(
        *PAUSED,
        Swapped(1.0, PauseReason.POLICY),
        ToolFinished(2.0),
        TurnArrived(2.1),
        FetchFailed(2.2, LoadFailure.NO_MEMORY),
    )
    assert (state.phase, state.active) == (Phase.RUNNING, 1)


@pytest.mark.parametrize(
    ("event", "phase", "actions"),
    [
        (CopyLost(3.0, LoadFailure.CACHE_RESET), Phase.RELEASED, (CancelFetch(),)),
        (Ended(3.0, ReleaseReason.ASKED), Phase.ENDED, (CancelFetch(), Conclude(1, 5))),
    ],
)
def test_a_fetch_that_nobody_needs_any_more_is_cancelled(
    event: Event, phase: Phase, actions: tuple[Action, ...]
) -> None:
    state, log = live(*PAUSED, Swapped(1.0, PauseReason.POLICY), ToolFinished(2.0), event)
    assert (state.phase, log[-1]) == (phase, actions)


def test_a_turn_that_is_aborted_or_goes_ahead_while_its_context_is_fetched_cancels_that() -> None:
    fetching = (*PAUSED, Swapped(1.0, PauseReason.POLICY), ToolFinished(2.0), TurnArrived(2.1))
    state, log = live(*fetching, TurnAborted(2.2))
    assert (state.phase, log[-1]) == (Phase.RELEASED, (CancelFetch(),))
    state, log = live(*fetching, Admitted(2.2))
    assert (state.phase, log[-1]) == (Phase.RUNNING, (CancelFetch(),))
    state, log = live(
        *fetching, Ended(2.2, ReleaseReason.ASKED), Fetched(2.3, 9.0), Admitted(2.4), TurnEnded(3.0, (), 1)
    )
    assert (state.phase, log[-1]) == (Phase.ENDED, (Conclude(2, 6),))


def test_a_copy_that_is_lost_leaves_a_released_program() -> None:
    state, log = live(
        *PAUSED, Swapped(1.0, PauseReason.POLICY), CopyLost(2.0, LoadFailure.CACHE_RESET), ToolFinished(3.0)
    )
    assert (state.phase, log[3:]) == (Phase.RELEASED, [(), (Observe("ls", 2.0),)])


def test_an_illegal_event_has_the_history_in_its_message_and_changes_nothing() -> None:
    state, _ = live(TurnArrived(0.0), TurnEnded(1.0, ("ls",), 5), Held(1.0, 2.0, PauseReason.TTL))
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
        Held(0.0, 1.0, PauseReason.POLICY),
        Released(0.0, PauseReason.POLICY),
        Swapped(0.0, PauseReason.POLICY),
        Fetched(0.0, 1.0),
        FetchFailed(0.0, LoadFailure.ABORTED),
        CopyLost(0.0, LoadFailure.GONE),
        HoldEnded(0.0, ReleaseReason.EXPIRED),
        ToolStarted(0.0, ("x",)),
        ToolFinished(0.0),
        Ended(0.0, ReleaseReason.IDLE),
    ]
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_holds_and_fetches_balance_and_turns_add_up(events: list[Event]) -> None:
    state, held, active, concluded, fetches = begin("t/p", 0.0), 0, 0, 0, 0
    for event in events:
        # What the scheduler guarantees: nobody ends a turn that is not in flight, or one that was not admitted.
        if isinstance(event, TurnEnded | TurnAborted | Admitted) and not state.active:
            continue
        if isinstance(event, TurnEnded) and state.phase in (Phase.RESUMING, Phase.FETCHING):
            continue
        if (state.phase, type(event)) not in TRANSITIONS:
            with pytest.raises(IllegalTransition):
                step(state, event)
            continue
        state, actions = step(state, event)
        active += isinstance(event, TurnArrived)
        active -= isinstance(event, TurnEnded | TurnAborted)
        held += isinstance(event, Held | Fetched)
        fetches -= isinstance(event, Fetched | FetchFailed)
        fetches += sum(isinstance(action, Fetch) - isinstance(action, CancelFetch) for action in actions)
        held -= sum(isinstance(action, FreeHold) for action in actions)
        concluded += sum(isinstance(action, Conclude) for action in actions)
        assert state.active == active
        assert held == (state.phase in (Phase.HELD, Phase.RESUMING))
        assert fetches == (state.phase is Phase.FETCHING)
        assert (state.phase is Phase.DECIDING) == (Decide() in actions)
        assert concluded == (state.phase is Phase.ENDED)
