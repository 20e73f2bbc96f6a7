"""The actors of one configuration: found or made, attended, watched, and replaced when they end.

All pools of a Ray namespace with the same configuration share them, by name. Ray restarts one that dies; one that has
left, or that another pool has ended, is made again.

Ray tells of a death after one to two seconds. So a pool holds a connection to each actor, which ends with it.
"""

import asyncio
import hashlib
import json
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.tool_config import ToolsConfig
from tools_runtime.actor_process import LOOKS, ToolActor

MAX_CONCURRENT_CALLS = 10_000
"""Of one actor; the tools' own limits come first."""

LONGEST_PERIOD_S = 5.0
"""Between two times that a pool attends."""

FIRST_WAITS_S = (0.1, 0.3, 1.0, 2.0, 4.0)
"""Before an actor that does not start is asked again, when a pool begins."""

AGAIN_S = (0.1, 2.0)
"""First and longest wait before a dead actor is asked again."""


class SharedActors:
    """One pool's view of the actors.

    Args:
        config: which tools there are, and how many actors.
        cpus: Ray CPUs that each actor reserves.
    """

    def __init__(self, config: ToolsConfig, cpus: float) -> None:
        self._text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        self._cpus = cpus
        self._period_s = min(LONGEST_PERIOD_S, config.unattended_s / LOOKS)
        self._handles = [self._found(index) for index in range(config.actors)]
        self._gone = [asyncio.Event() for _ in self._handles]
        """Set when the actor's process is gone; another one for its successor."""
        self._attending: list[asyncio.Task[None]] = []
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._reviving: dict[int, asyncio.Task[None]] = {}
        """Actors that died, each with the task that waits for it to be back."""

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, index: int) -> Any:
        """The actor's handle of now."""
        return self._handles[index]

    @property
    def living(self) -> list[int]:
        """Those that are not known to be dead."""
        return [index for index in range(len(self)) if index not in self._reviving]

    def gone(self, index: int) -> asyncio.Event:
        """Set when the process that this actor has now is gone."""
        return self._gone[index]

    def attend(self) -> None:
        """From now on, let the actors know that they are needed; again is nothing."""
        if not self._attending:
            self._attending = [asyncio.create_task(self._attend(index)) for index in range(len(self))]

    async def ready(self) -> list[int]:
        """The actors' process ids, once all can run tools.

        Raises:
            RayError: one cannot: what its ConfigError says is in the message.
        """
        self.attend()
        pids = await asyncio.gather(*(self._started(index) for index in range(len(self))))
        for index in range(len(self)):
            self._watch(index)
        return list(pids)

    async def one_living(self) -> None:
        """Wait until one is not known to be dead."""
        while not self.living:
            await asyncio.wait(self._reviving.values(), return_when=asyncio.FIRST_COMPLETED)

    def revive(self, index: int) -> None:
        """The actor's process is gone: wait for the next one."""
        if index in self._reviving:
            return
        self._gone[index].set()
        self._gone[index] = asyncio.Event()
        self._reviving[index] = asyncio.create_task(self._until_ready(index))

    def close(self, *, kill: bool) -> None:
        """Attend no longer; ``kill`` ends the actors, whoever else uses them."""
        for task in (*self._attending, *self._reviving.values(), *self._watching.values()):
            task.cancel()
        if kill:
            for actor in self._handles:
                ray.kill(actor)

    def _found(self, index: int) -> Any:
        digest = hashlib.sha256(self._text.encode()).hexdigest()[:24]
        options = ray.remote(ToolActor).options(
            name=f"caesura-tools-{digest}-{index}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=self._cpus,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=MAX_CONCURRENT_CALLS,
            enable_task_events=False,  # as Serve's actors: the GCS would keep each call for a page that nobody looks at
        )
        return options.remote(self._text)

    async def _renew(self, index: int) -> None:
        self._handles[index] = await asyncio.to_thread(self._found, index)

    async def _started(self, index: int) -> int:
        for wait_s in FIRST_WAITS_S:
            try:
                return int(await self._handles[index].ready.remote())
            except RayActorError:  # it was about to leave, or is starting again
                await asyncio.sleep(wait_s)
                await self._renew(index)
        return int(await self._handles[index].ready.remote())

    async def _attend(self, index: int) -> None:
        while True:
            if index not in self._reviving:
                try:
                    await self._handles[index].attend.remote()
                except RayActorError:
                    self.revive(index)
            await asyncio.sleep(self._period_s)

    def _watch(self, index: int) -> None:
        if index not in self._watching:
            self._watching[index] = asyncio.create_task(self._until_gone(index))

    async def _until_gone(self, index: int) -> None:
        try:
            address = await self._handles[index].door.remote()
            if not await _held(*address):
                return  # the network lets nobody in; Ray will tell
            while await _held(*address):
                pass  # only the connection broke
            self.revive(index)
        except RayActorError:
            self.revive(index)
        finally:
            del self._watching[index]

    async def _until_ready(self, index: int) -> None:
        wait_s, longest_s = AGAIN_S
        try:
            while True:
                try:
                    await self._handles[index].ready.remote()
                    self._watch(index)
                    return
                except RayActorError:
                    await asyncio.sleep(wait_s)  # Ray is starting it again, unless it has left
                    wait_s = min(wait_s * 1.5, longest_s)
                    await self._renew(index)
                except RayError:
                    return  # it is back, but its tools cannot work: its calls say why
        finally:
            del self._reviving[index]


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
