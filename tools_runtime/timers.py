"""Deadlines on a Clock: what the executor needs beside the time is to be woken at one."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from cluster.clock import Clock, MonotonicClock


class Timer(Protocol):
    """A wake-up that was asked for."""

    def cancel(self) -> None:
        """Do not wake."""
        ...


class TimerClock(Clock, Protocol):
    """What time is it, and who wakes me?"""

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        """Call ``wake`` at ``at_s`` of this clock, or soon if that is past."""
        ...


class LoopClock(MonotonicClock):
    """The machine's monotonic clock, with the running event loop's timers.

    Not the loop's own time: uvloop, on which Ray's actors run, keeps that in whole milliseconds.
    """

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        """Call ``wake`` at ``at_s``."""
        return asyncio.get_running_loop().call_later(max(0.0, at_s - self.now_s()), wake)


async def sleep_until(clock: TimerClock, at_s: float) -> None:
    """Wait until ``at_s`` of ``clock``."""
    if at_s <= clock.now_s():
        return
    woken = asyncio.get_running_loop().create_future()
    timer = clock.call_at(at_s, lambda: None if woken.done() else woken.set_result(None))
    try:
        await woken
    finally:
        timer.cancel()
