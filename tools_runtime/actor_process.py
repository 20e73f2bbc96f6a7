"""The Ray actor: one process that runs tools, shared by all pools of the same configuration.

It is detached, so that it and its calls outlive their callers. It ends itself when no pool attends to it any more.
"""

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

import ray

from cluster.config.tools import ToolsConfig
from cluster.core.clock import Clock
from cluster.core.errors import ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolOffer, ToolResult
from cluster.observing.logs import bind, configure_from_environment
from cluster.observing.meter import Meter
from cluster.observing.recorders import ToolMetrics
from tools_runtime.host import ToolHost
from tools_runtime.kind import LoopClock


class Attendance:
    """Decides when an actor may end: nobody has attended for a time, and no call was in progress in it.

    Args:
        clock: the clock.
        unattended_s: this time, in seconds.
    """

    def __init__(self, clock: Clock, unattended_s: float) -> None:
        self._clock = clock
        self._unattended_s = unattended_s
        self._last_s = clock.now_s()
        self._calls = 0

    def attend(self) -> None:
        """Record that a pool attends."""
        self._last_s = self._clock.now_s()

    def begin(self) -> None:
        """Record that a call begins."""
        self._calls += 1

    def end(self) -> None:
        """Record that a call has ended.

        It counts as attended, because the caller may be gone and its successor not yet there.
        """
        self._calls -= 1
        self.attend()

    def is_over(self, *, busy: bool = False) -> bool:
        """Return whether the actor may end.

        Args:
            busy: whether other work is in progress, which counts as a call.
        """
        if busy:
            self.attend()
        return self._calls == 0 and self._clock.now_s() - self._last_s >= self._unattended_s


LOOKS = 4
"""How often within `unattended_s` an actor checks whether it is attended, and a pool attends."""


class ToolActor:
    """One process that runs tools.

    Args:
        config: `ToolsConfig`, as JSON.

    Raises:
        ConfigError: a tool cannot work as configured.
    """

    def __init__(self, config: str) -> None:
        configure_from_environment("tools")
        self._config = ToolsConfig.model_validate_json(config)
        self._metrics = ToolMetrics(Meter(), self._config.defined)
        self._host: ToolHost | None = None
        self._door: asyncio.Server | None = None
        self._attempts: dict[str, asyncio.Task[ToolResult]] = {}
        self._attendance = Attendance(LoopClock(), self._config.unattended_s)
        self._look_s = self._config.unattended_s / LOOKS
        # A thread, since there is no event loop yet, and nobody might ever call an actor that Ray has restarted.
        context = ray.get_runtime_context()
        threading.Thread(target=self._look, args=(context.current_actor,), daemon=True).start()

    async def attend(self) -> None:
        """Record that a pool attends."""
        self._attendance.attend()

    async def door(self) -> tuple[str, int]:
        """Return address and port for connections that carry no data and end with this process."""
        if self._door is None:
            self._door = await asyncio.start_server(_hold, ray.util.get_node_ip_address(), 0)
        host, port = self._door.sockets[0].getsockname()[:2]
        return host, port

    async def ready(self, *, opened: bool = True) -> int:
        """Return its process id, once its tools can be called.

        Args:
            opened: whether to wait also until each tool was opened, so that it can be listed, or cannot be reached yet.

        Raises:
            ConfigError: a tool cannot work as configured.
        """
        self._attendance.attend()
        host = self._begun()
        if opened:
            await host.open()
        return os.getpid()

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None, resumed: bool, attempt: str
    ) -> ToolResult:
        """Run a call and return its one outcome.

        The call does not end with its caller, unless the caller calls `abandon`.

        Args:
            call: the call to run.
            definitions: the tools that the request brought.
            resumed: see `ToolExecutor.run`.
            attempt: names this sending of the call, for `abandon`.
        """
        bind(program=call.program, call=call.id, tool=call.name)
        self._attendance.begin()
        task = self._attempts[attempt] = asyncio.create_task(self._run(call, definitions, resumed))
        try:
            await asyncio.wait({task})
            if task.cancelled():  # and nobody listens
                return ToolResult(call.id, call.name, Outcome.CANCELLED, f"{Outcome.CANCELLED}: it was abandoned")
            return task.result()
        finally:
            del self._attempts[attempt]
            self._attendance.end()

    async def abandon(self, attempt: str) -> None:
        """Cancel an attempt for whose result nobody waits. Its call ends, unless another attempt has taken it over."""
        if task := self._attempts.get(attempt):
            task.cancel()

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED. Return False if it is not in progress here."""
        return self._host is not None and self._host.executor.cancel(program, call_id)

    async def knows(self, call: ToolCall) -> bool:
        """Return whether a call is in progress here, or its result is kept."""
        return self._host is not None and self._host.executor.knows(call)

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """Wait for more output of a call; see `ToolExecutor.output`."""
        return None if self._host is None else await self._host.executor.output(program, call_id, known)

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Wait for the result of an asynchronous call."""
        return await self._begun().executor.completion(program, call_id)

    async def offers(self, definitions: Mapping[str, Any] | None, tenant: str) -> list[ToolOffer] | str:
        """Return the tools that are known now, or the reason why those of the tenant's request are rejected."""
        self._attendance.begin()
        try:
            return await self._begun().offers(definitions, tenant)
        except ToolRefused as refusal:
            return str(refusal)
        finally:
            self._attendance.end()

    async def _run(self, call: ToolCall, definitions: Mapping[str, Any] | None, resumed: bool) -> ToolResult:
        return await self._begun().run(call, definitions, resumed=resumed)

    def _begun(self) -> ToolHost:
        """Return the host. Its tools are opened, or begin to be opened in the background."""
        if self._host is None:
            self._host = ToolHost(self._config, observe=self._metrics.record)
        self._host.begin()
        return self._host

    def _is_unattended(self) -> bool:
        return self._attendance.is_over(busy=self._host is not None and self._host.executor.under_way > 0)

    def _look(self, itself: Any) -> None:
        pause, before = threading.Event(), False
        while not pause.wait(self._look_s):
            unattended = self._is_unattended()
            if unattended and before:  # twice, as a blocked loop may have delayed an attend
                # Not exit_actor(): that waits for all that is under way, and only a task can call it. This is as final.
                ray.kill(itself)
                return
            before = unattended


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()
