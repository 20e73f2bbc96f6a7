"""The steps of a cluster's start and stop on a terminal, each with its time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from cluster.clock import MonotonicClock

if TYPE_CHECKING:
    from rich.console import Console


def timed_steps(console: "Console") -> Callable[[str], AbstractContextManager[None]]:
    """What `cluster.serving.LocalCluster` is told its steps with."""
    clock = MonotonicClock()

    @contextmanager
    def step(name: str) -> Iterator[None]:
        begun_s = clock.now_s()
        with console.status(name):
            yield
        console.print(f"  {name:<32} {clock.now_s() - begun_s:6.1f} s")

    return step
