"""Python functions. Coroutines run on the actor's event loop; others run in worker processes, which can be killed.

A generator yields its answer in pieces, which are reported as they come.
"""

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from cluster.config.tools import PythonTool
from cluster.core.errors import ConfigError, ToolError, ToolFailed, ToolRefused, ToolUnknown
from tools_runtime import python_worker
from tools_runtime.kind import Invocation, SingleTool, ToolOutput
from tools_runtime.processes import Child, spawn

MAX_GROWTH = 4
"""Largest number of bytes of UTF-8 for each character of an answer."""


class PythonKind(SingleTool):
    """One function.

    Raises:
        ConfigError: it cannot be imported, or its schema cannot be used.
    """

    def __init__(self, name: str, config: PythonTool) -> None:
        try:
            super().__init__(name, config.description, config.parameters)
        except ValueError as error:
            raise ConfigError(f"tools.defined.{name}.parameters: {error}") from None
        self._config = config
        self._isolation: str = config.isolation
        self._function: Callable[..., Any] | None = None
        self._idle: list[Child] = []
        self._threads: ThreadPoolExecutor | None = None
        if config.isolation != "process":
            self._function = self._imported(name)
            is_async = inspect.iscoroutinefunction(self._function) or inspect.isasyncgenfunction(self._function)
            if config.isolation == "auto":
                self._isolation = "async" if is_async else "process"
            elif is_async != (config.isolation == "async"):
                raise ConfigError(f"tools.defined.{name}: a coroutine function needs isolation async, others any other")
        if self._isolation == "thread":
            self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix=f"tool {name}")

    async def open(self) -> None:
        """Do nothing: workers are started when they are needed, and kept."""

    async def run(self, invocation: Invocation) -> ToolOutput:
        """Call the function.

        Raises:
            ToolFailed: it raised something.
            ToolUnknown: its worker died.
        """
        if self._isolation == "process":
            return await self._in_worker(invocation)
        assert self._function is not None
        try:
            return ToolOutput(
                await (self._on_loop(invocation) if self._threads is None else self._in_thread(invocation))
            )
        except ToolError:
            raise
        except Exception as error:
            raise ToolFailed(python_worker.told(error)) from error

    async def aclose(self) -> None:
        """End the workers. Threads end when their calls do."""
        idle, self._idle = self._idle, []
        for child in idle:
            child.end()
        await asyncio.gather(*(child.reaped() for child in idle))
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _imported(self, name: str) -> Callable[..., Any]:
        try:
            function = python_worker.load(self._config.entry)
        except Exception as error:
            raise ConfigError(f"tools.defined.{name}.entry: {python_worker.told(error)}") from error
        if not callable(function):
            raise ConfigError(f"tools.defined.{name}.entry: {self._config.entry} is no function")
        return function

    async def _on_loop(self, invocation: Invocation) -> str:
        assert self._function is not None
        value = self._function(**invocation.arguments)
        if not inspect.isasyncgen(value):
            return python_worker.as_text(await value)
        pieces: list[str] = []
        async with aclosing(value):
            async for piece in value:
                pieces.append(python_worker.as_text(piece))
                invocation.report(pieces[-1])
        return "".join(pieces)

    async def _in_thread(self, invocation: Invocation) -> str:
        assert self._threads is not None and self._function is not None
        function, loop = self._function, asyncio.get_running_loop()

        def run() -> str:
            pieces: list[str] = []
            try:
                for piece in python_worker.pieces_of(function(**invocation.arguments)):
                    pieces.append(piece)
                    loop.call_soon_threadsafe(invocation.report, piece)
            # A future cannot have the first, and would never be done. The second would end the loop of all tools.
            except (StopIteration, SystemExit) as error:
                raise ToolFailed(python_worker.told(error)) from error
            return "".join(pieces)

        call = loop.run_in_executor(self._threads, run)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # The thread goes on, and so it keeps its slot of the tool.
            with contextlib.suppress(Exception):
                await call
            raise

    async def _in_worker(self, invocation: Invocation) -> ToolOutput:
        child = await self._worker()
        reusable = False
        try:
            status, text = await self._asked(child, invocation)
            reusable = status != python_worker.BROKEN
        except asyncio.IncompleteReadError as error:
            raise ToolUnknown("the process that ran the function died") from error
        finally:
            if reusable and child.alive:
                self._idle.append(child)
            else:
                child.end()
        if status == python_worker.BROKEN:
            raise ToolRefused(f"the function cannot be imported: {text}")
        if status == python_worker.FAILED:
            raise ToolFailed(text)
        return ToolOutput(text, truncated=status == python_worker.CUT)

    async def _worker(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            child.end()
        argv = [sys.executable, "-m", "tools_runtime.python_worker", self._config.entry]
        prlimit = shutil.which("prlimit")
        if self._config.memory_bytes is not None:
            if prlimit is None:
                raise ToolRefused("prlimit (util-linux) is not installed, so memory_bytes cannot be kept")
            argv = [prlimit, f"--as={self._config.memory_bytes}", "--", *argv]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        return await spawn(argv, environment, feed=True, join_errors=False)

    async def _asked(self, child: Child, invocation: Invocation) -> tuple[int, str]:
        call = {"arguments": dict(invocation.arguments), "cap_bytes": invocation.output_cap_bytes}
        encoded = json.dumps(call).encode()
        assert child.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # that it died shows when its answer is read
            child.process.stdin.write(python_worker.CALL.pack(len(encoded)) + encoded)
            await child.process.stdin.drain()
        parts: list[str] = []
        room = MAX_GROWTH * max(invocation.output_cap_bytes, 4096)
        while True:
            status, size = python_worker.ANSWER.unpack(await child.output.readexactly(python_worker.ANSWER.size))
            room -= size
            if room < 0:
                raise ToolFailed("the process that ran the function answered nonsense")
            text = (await child.output.readexactly(size)).decode(errors="replace")
            if status in (python_worker.FAILED, python_worker.BROKEN):
                return status, text
            parts.append(text)
            if status != python_worker.PART:
                return status, "".join(parts)
            invocation.report(text)
