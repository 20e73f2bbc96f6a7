"""Turns in the direct data plane: each placement ends once, however little is heard of it."""

from collections.abc import Callable

import pytest

from cluster.direct.open_turns import SILENCE_S, OpenTurns
from router.decisions import TurnRequest
from router.placement import Placement, SessionPlacer


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class Noted(SessionPlacer):
    """Notes how turns end."""

    def __init__(self) -> None:
        super().__init__("noted")
        self.ends: dict[str, bool] = {}

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        assert placement.turn_id not in self.ends
        self.ends[placement.turn_id] = complete


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def turns(clock: ManualClock) -> OpenTurns:
    return OpenTurns(clock, "router")


@pytest.fixture
def places() -> Noted:
    return Noted()


Opened = Callable[[str, str], str]


@pytest.fixture
def opened(turns: OpenTurns, places: Noted) -> Opened:
    def open_(key: str, replica: str) -> str:
        request = TurnRequest(key=key, tenant="default", prompt_tokens=1)
        return turns.opened(Placement(places, request, replica, None, key), replica)

    return open_


def test_a_turn_ends_as_its_replica_says(turns: OpenTurns, places: Noted, opened: Opened) -> None:
    good, bad = opened("a", "r1"), opened("b", "r1")
    turns.told("r1", [(good, True), (bad, False), ("another-router-0", True)], None)
    turns.told("r1", [(good, False)], None)
    assert places.ends == {"a": True, "b": False}
    assert len(turns) == 0


def test_a_turn_under_way_is_kept_however_long_it_takes(
    turns: OpenTurns, places: Noted, opened: Opened, clock: ManualClock
) -> None:
    name = opened("a", "r1")
    for _ in range(5):
        clock.time_s += SILENCE_S - 1
        turns.told("r1", [], [name])
        turns.sweep()
    assert places.ends == {}


def test_a_request_that_never_arrived_is_given_up(
    turns: OpenTurns, places: Noted, opened: Opened, clock: ManualClock
) -> None:
    opened("a", "r1")
    turns.told("r1", [], [])
    assert places.ends == {}  # it may be on its way
    clock.time_s += SILENCE_S + 1
    turns.told("r1", [], [])
    assert places.ends == {"a": False}


def test_the_turns_of_a_replica_that_is_gone_are_given_up(
    turns: OpenTurns, places: Noted, opened: Opened, clock: ManualClock
) -> None:
    lost, kept = opened("a", "r1"), opened("b", "r2")
    turns.told("r1", [], [lost])
    clock.time_s += SILENCE_S + 1
    turns.told("r2", [], [kept])
    turns.sweep()
    assert places.ends == {"a": False}
    assert len(turns) == 1
