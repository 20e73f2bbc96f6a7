"""The Ray shell: a pool of actors, each a `ToolHost`, restarted when it dies. The only module here that imports ray.

A call goes to the actor with the fewest calls outstanding; calls with an idempotency key, and all calls of one program
to a `sticky` tool, go to one actor as long as that lives. A call whose actor dies is run once more elsewhere if its
tool is idempotent; else its outcome is UNKNOWN. Limits of concurrency hold in each actor.

Ray tells of a death after one to two seconds. So the pool holds a connection to each actor, which ends with it.
"""

import asyncio
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.errors import IntegrityError
from cluster.metrics import ToolMetrics
from cluster.tool_config import ToolModel, ToolsConfig, owner_of
from cluster.tools import Outcome, ToolCall, ToolResult
from tools_runtime.host import ToolHost

MAX_CONCURRENT_CALLS = 10_000
"""Of one actor; the tools' own limits come first."""

ANSWER_S = 0.05
"""Longer than its deadline a call takes at most, if its actor does not answer at all."""

MAX_STARTED = 65_536
"""Asynchronous calls whose actor is remembered."""


class ToolActor:
    """One process that runs tools.

    Args:
        config: `ToolsConfig`, as JSON.

    Raises:
        ConfigError: a tool cannot work as configured.
    """

    def __init__(self, config: str) -> None:
        metrics = ToolMetrics()
        self._config = ToolsConfig.model_validate_json(config)
        self._metrics = metrics
        self._host: ToolHost | None = None
        self._door: asyncio.Server | None = None

    async def door(self) -> tuple[str, int]:
        """Address and port of connections that say nothing, and end with this process."""
        if self._door is None:
            self._door = await asyncio.start_server(_hold, ray.util.get_node_ip_address(), 0)
        host, port = self._door.sockets[0].getsockname()[:2]
        return host, port

    async def ready(self) -> int:
        """Its process id, once its tools can be called.

        Raises:
            ConfigError: a tool cannot work as configured.
        """
        if self._host is None:
            self._host = ToolHost(self._config, observe=self._metrics.record)
        await self._host.open()
        return os.getpid()

    async def run(self, call: ToolCall, definitions: Mapping[str, Any] | None) -> ToolResult:
        """The call's one outcome."""
        await self.ready()
        assert self._host is not None
        return await self._host.run(call, definitions)

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED; False if it is not under way here."""
        return self._host is not None and self._host.executor.cancel(program, call_id)

    async def poll(self, program: str, call_id: str) -> ToolResult | None:
        """The answer of an asynchronous call, None while there is none."""
        await self.ready()
        assert self._host is not None
        return self._host.executor.poll(program, call_id)

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The answer of an asynchronous call, when it is there."""
        await self.ready()
        assert self._host is not None
        return await self._host.executor.completion(program, call_id)

    async def offers(self) -> list[dict[str, Any]]:
        """The configured tools that are known now."""
        await self.ready()
        assert self._host is not None
        return self._host.offers()


class ToolActors:
    """The pool, as its callers see it.

    Args:
        config: which tools there are, and how many actors.
        cpus: Ray CPUs that each actor reserves.
    """

    def __init__(self, config: ToolsConfig, cpus: float = 0.0) -> None:
        self._config = config
        remote = ray.remote(ToolActor).options(
            num_cpus=cpus, max_restarts=-1, max_task_retries=0, max_concurrency=MAX_CONCURRENT_CALLS
        )
        text = config.model_dump_json()
        self._actors = [remote.remote(text) for _ in range(config.actors)]
        self._outstanding = [0] * config.actors
        self._gone = [asyncio.Event() for _ in self._actors]
        """Set when the actor's process is gone; another one for its successor."""
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._reviving: dict[int, asyncio.Task[None]] = {}
        """Actors that died, each with the task that waits for it to be back."""
        self._started: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._running: dict[tuple[str, str], int] = {}

    async def ready(self) -> list[int]:
        """The actors' process ids, once all can run tools.

        Raises:
            RayError: one cannot: what its ConfigError says is in the message.
        """
        pids = await asyncio.gather(*(actor.ready.remote() for actor in self._actors))
        for index in range(len(self._actors)):
            self._watch(index)
        return list(pids)

    async def run(self, call: ToolCall, definitions: Mapping[str, Any] | None = None) -> ToolResult:
        """The call's one outcome; see `ToolExecutor.run`."""
        settings = self._settings(call.name)
        index = await self._pick(call, settings)
        result = await self._run_on(index, call, definitions, settings)
        if result is None and settings is not None and settings.idempotent:
            result = await self._run_on(await self._pick(call, settings), call, definitions, settings)
        if result is None:
            text = f"unknown: what ran {call.name} died; the tool may have taken effect"
            result = ToolResult(call.id, call.name, Outcome.UNKNOWN, text, statistics_name=call.name)
        return result

    async def run_all(
        self, calls: Sequence[ToolCall], definitions: Mapping[str, Any] | None = None
    ) -> list[ToolResult]:
        """The calls of one turn, together: as long as the slowest, in the order asked."""
        return list(await asyncio.gather(*(self.run(call, definitions) for call in calls)))

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED; False if no such call is under way."""
        index = self._running.get((program, call_id), self._started.get((program, call_id)))
        if index is None:
            return False
        try:
            return bool(await self._actors[index].cancel.remote(program, call_id))
        except RayActorError:
            return False  # it died, and the call with it

    async def poll(self, program: str, call_id: str) -> ToolResult | None:
        """The answer of an asynchronous call, None while there is none; UNKNOWN if its actor died."""
        return await self._ask("poll", program, call_id)

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The answer of an asynchronous call, when it is there; UNKNOWN if its actor died."""
        result = await self._ask("completion", program, call_id)
        assert result is not None
        return result

    async def offers(self) -> list[dict[str, Any]]:
        """The configured tools that are known now: name, description, parameters."""
        index = await self._least_busy()
        return list(await self._actors[index].offers.remote())

    async def aclose(self) -> None:
        """End all actors."""
        for task in (*self._reviving.values(), *self._watching.values()):
            task.cancel()
        for actor in self._actors:
            ray.kill(actor)

    def check_integrity(self) -> None:
        """Nothing is outstanding when nothing runs.

        Raises:
            IntegrityError: not so.
        """
        if sum(self._outstanding) != len(self._running) or min(self._outstanding) < 0:
            raise IntegrityError(f"{self._outstanding} calls outstanding, but {len(self._running)} run")

    def _settings(self, tool: str) -> ToolModel | None:
        defined = self._config.defined
        name = owner_of(tool, lambda name: defined[name].kind if name in defined else None)
        return None if name is None else defined[name]

    async def _pick(self, call: ToolCall, settings: ToolModel | None) -> int:
        home = None
        if call.idempotency_key is not None:
            home = f"{call.program}\n{call.name}\n{call.idempotency_key}"
        elif settings is not None and settings.sticky:
            home = call.program
        if home is not None:
            index = zlib.crc32(home.encode(errors="replace")) % len(self._actors)
            if index not in self._reviving:
                return index
        return await self._least_busy()

    async def _least_busy(self) -> int:
        while True:
            living = [index for index in range(len(self._actors)) if index not in self._reviving]
            if living:
                return min(living, key=lambda index: self._outstanding[index])
            await asyncio.wait(self._reviving.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _run_on(
        self, index: int, call: ToolCall, definitions: Mapping[str, Any] | None, settings: ToolModel | None
    ) -> ToolResult | None:
        """The outcome; None if the actor died."""
        self._outstanding[index] += 1
        self._running[call.key] = index
        answer = asyncio.ensure_future(_awaited(self._actors[index].run.remote(call, definitions)))
        gone = asyncio.ensure_future(self._gone[index].wait())
        try:
            either: set[asyncio.Future[Any]] = {answer, gone}
            patience_s = self._patience_s(call, settings)
            await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and gone.done():
                return None
            if not answer.done():
                text = f"timeout: {call.name} did not answer, and nor did what runs it; it may have taken effect"
                return ToolResult(call.id, call.name, Outcome.TIMEOUT, text, statistics_name=call.name)
            result = answer.result()
            if result.outcome is Outcome.STARTED:
                self._remember(call, index)
            return result
        except RayActorError:
            self._revive(index)
            return None
        except RayError as error:
            return ToolResult(call.id, call.name, Outcome.UNKNOWN, f"unknown: {str(error)[:500]}")
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
                self._actors[index].cancel.remote(call.program, call.id)
            self._outstanding[index] -= 1
            self._running.pop(call.key, None)

    def _patience_s(self, call: ToolCall, settings: ToolModel | None) -> float:
        longest = self._config.max_request_deadline_s if settings is None else settings.deadline_s
        return (longest if call.deadline_s is None else min(longest, max(0.0, call.deadline_s))) + ANSWER_S

    def _watch(self, index: int) -> None:
        if index not in self._watching:
            self._watching[index] = asyncio.create_task(self._until_gone(index))

    async def _until_gone(self, index: int) -> None:
        try:
            address = await self._actors[index].door.remote()
            if not await _held(*address):
                return  # the network lets nobody in; Ray will tell
            while await _held(*address):
                pass  # only the connection broke
            self._revive(index)
        except RayActorError:
            self._revive(index)
        finally:
            del self._watching[index]

    def _revive(self, index: int) -> None:
        if index in self._reviving:
            return
        self._gone[index].set()
        self._gone[index] = asyncio.Event()
        self._reviving[index] = asyncio.create_task(self._until_ready(index))

    async def _until_ready(self, index: int) -> None:
        try:
            while True:
                try:
                    await self._actors[index].ready.remote()
                    self._watch(index)
                    return
                except RayActorError:
                    await asyncio.sleep(0.1)  # Ray is starting it again
                except RayError:
                    return  # it is back, but its tools cannot work: its calls say why
        finally:
            del self._reviving[index]

    def _remember(self, call: ToolCall, index: int) -> None:
        self._started[call.key] = index
        if len(self._started) > MAX_STARTED:
            self._started.popitem(last=False)

    async def _ask(self, method: str, program: str, call_id: str) -> ToolResult | None:
        text = "unknown: there is no such call, or what ran it died; the tool may have taken effect"
        lost = ToolResult(call_id, "", Outcome.UNKNOWN, text)
        index = self._started.get((program, call_id))
        if index is None:
            return lost
        try:
            result: ToolResult | None = await getattr(self._actors[index], method).remote(program, call_id)
        except RayActorError:
            self._revive(index)
            return lost
        return result


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()


async def _held(host: str, port: int) -> bool:
    """Hold a connection until it ends; False if there was none."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        await reader.read(1)
    except OSError:
        pass
    finally:
        writer.close()
    return True


async def _awaited(reference: Any) -> ToolResult:
    result: ToolResult = await reference
    return result
