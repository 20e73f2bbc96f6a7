"""Virtual time: one order, never backwards."""

import pytest

from cluster.core.clock import ManualClock
from cluster.offline.simulator.simulation import Timeline


def test_events_happen_in_order_of_time_then_of_planning() -> None:
    clock = ManualClock()
    seen: list[object] = []
    timeline = Timeline(clock, lambda: seen.append(("settled", clock.now_s())))
    timeline.at(2.0, lambda: seen.append("c"))
    timeline.at(1.0, lambda: seen.append("a"))
    timeline.at(1.0, lambda: (seen.append("b"), timeline.at(1.0, lambda: seen.append("b2")))[0])
    timeline.at(9.0, lambda: seen.append("never"))
    timeline.run(2.0)
    assert seen == ["a", "b", "b2", ("settled", 1.0), "c", ("settled", 2.0)]
    assert clock.now_s() == 2.0


def test_nothing_can_be_planned_in_the_past() -> None:
    clock = ManualClock(5.0)
    timeline = Timeline(clock, lambda: None)
    with pytest.raises(ValueError, match="an event at 4"):
        timeline.at(4.0, lambda: None)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.move_to(4.999)
    clock.move_to(5.0)
    assert clock.now_s() == 5.0
