"""Work that several want at the same time is done once."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class SingleFlight:
    """Work under way, by its name."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def do(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What the work of that name gives. Whoever asks meanwhile shares it; no one of them can cancel it."""
        task = self._tasks.get(name)
        if task is None:
            self._tasks[name] = task = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return await asyncio.shield(task)

    def stop(self) -> None:
        """End all of it."""
        for task in self._tasks.values():
            task.cancel()
