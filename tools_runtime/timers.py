"""Deadlines on a Clock: what the executor needs beside the time is to be woken at one."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from cluster.clock import Clock


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


class LoopClock:
    """The running event loop's clock, which is the machine's monotonic one."""

    def now_s(self) -> float:
        """Seconds since boot."""
        return asyncio.get_running_loop().time()

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        """Call ``wake`` at ``at_s``."""
        return asyncio.get_running_loop().call_at(at_s, wake)


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
