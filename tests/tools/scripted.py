"""Clocks and tools that tests have in hand."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.config.tools import PythonTool, ToolModel
from cluster.core.clock import ManualClock
from tools_runtime.kind import Invocation, SingleTool, Timer, ToolOutput

SERVERS = Path(__file__).parent / "servers"


class _Wake:
    def __init__(self, at_s: float, wake: Callable[[], None]) -> None:
        self.at_s = at_s
        self.wake = wake
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualTimers(ManualClock):
    """A clock that stands still until it is moved, and then wakes those who are due, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._wakes: list[_Wake] = []

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        timer = _Wake(at_s, wake)
        self._wakes.append(timer)
        return timer

    async def pass_s(self, seconds: float) -> None:
        """Move forward, waking on the way, and let everybody who was woken run."""
        until_s = self.now_s() + seconds
        await settle()
        while due := [wake for wake in self._wakes if wake.at_s <= until_s and not wake.cancelled]:
            first = min(due, key=lambda wake: wake.at_s)
            self._wakes.remove(first)
            self.move_to(max(first.at_s, self.now_s()))
            first.wake()
            await settle()
        self.move_to(until_s)


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


class ScriptedKind(SingleTool):
    """A tool that does what the test says: a script of one step for each start; the last step is repeated."""

    def __init__(
        self, name: str, *steps: Callable[[Invocation], Any], parameters: dict[str, Any] | None = None
    ) -> None:
        super().__init__(name, "a tool of the test", parameters or {"type": "object"})
        self.steps = steps
        self.started: list[Invocation] = []
        self.cancelled = 0
        self.running = 0

    async def open(self) -> None:
        """Nothing."""

    async def run(self, invocation: Invocation) -> ToolOutput:
        self.started.append(invocation)
        step = self.steps[min(len(self.started), len(self.steps)) - 1]
        self.running += 1
        try:
            said = step(invocation)
            said = await said if asyncio.iscoroutine(said) else said
            return said if isinstance(said, ToolOutput) else ToolOutput(str(said))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def aclose(self) -> None:
        """Nothing."""


def settings(**said: Any) -> ToolModel:
    """Settings that do not matter to a scripted kind, beside those that do."""
    return PythonTool.model_validate({"kind": "python", "entry": "tests:none", **said})
