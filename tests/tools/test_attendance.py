"""When a process that belongs to nobody may end."""

from cluster.core.clock import ManualClock
from tools_runtime.actor_process import Attendance


def test_it_is_over_a_time_after_the_last_who_attended() -> None:
    clock = ManualClock()
    attendance = Attendance(clock, 60.0)
    clock.move_to(59.0)
    assert not attendance.is_over()
    attendance.attend()
    clock.move_to(118.0)
    assert not attendance.is_over()
    clock.move_to(119.0)
    assert attendance.is_over()


def test_no_call_is_left_alone_nor_its_result_at_once() -> None:
    clock = ManualClock()
    attendance = Attendance(clock, 60.0)
    attendance.begin()
    attendance.begin()
    clock.move_to(1000.0)
    attendance.end()
    assert not attendance.is_over()
    clock.move_to(2000.0)
    assert not attendance.is_over(), "one is still under way"
    attendance.end()
    clock.move_to(2059.0)
    assert not attendance.is_over(), "whoever resumes it may come yet"
    assert not attendance.is_over(busy=True)
    clock.move_to(2118.0)
    assert not attendance.is_over()
    clock.move_to(2119.0)
    assert attendance.is_over()
