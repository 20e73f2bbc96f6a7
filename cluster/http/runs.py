"""Functions of all routes that start a run: its limits, and the disconnect of its client."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.api.sse import EventStream as EventStream
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import RunStoreUnavailable
from cluster.core.tools import ToolOffer
from cluster.runs.events import Limits
from cluster.runs.runner import ProgramRunner

logger = logging.getLogger("ray.serve")

Offers = Callable[[str, Mapping[str, Any] | None], Awaitable[Sequence[ToolOffer]]]
"""A function from a tenant and the definitions of a request's own tools to all tools that are offered now. It raises
ToolRefused if the request's tools are invalid, and Overloaded if the tool runtime does not answer."""

Prepare = Callable[[], Awaitable[dict[str, Any]]]
"""A function that chooses the model of a request and fetches its images, and returns its body for replicas. It raises
BadRequest. An idempotency key is looked up before, because both may have another result when the request comes again.
"""


class Abandon:
    """Cancels runs whose client has disconnected. It does not wait, since the calling task is being cancelled itself.

    Args:
        runner: runs the programs.
    """

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner
        self._cancelling: set[asyncio.Task[None]] = set()

    def __call__(self, run_id: str) -> None:
        """Start a task that cancels this run."""
        task = asyncio.create_task(self._cancel(run_id))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel(self, run_id: str) -> None:
        try:
            await self._runner.abandon(run_id)
        except RunStoreUnavailable as error:
            logger.warning("%s, whose client has gone, could not be cancelled: %s", run_id, error)


def limits(config: CaesuraConfig) -> Limits:
    """Return the configured limits of a run."""
    programs = config.programs
    return Limits(
        turns=programs.max_turns,
        tool_calls=programs.max_tool_calls,
        output_tokens=programs.max_output_tokens,
        wall_s=programs.max_wall_s,
        turn_attempts=programs.turn_attempts,
    )


def described(one: ToolOffer) -> dict[str, Any]:
    """Return a tool's name, description and parameters as JSON values."""
    return {"name": one.name, "description": one.description, "parameters": one.parameters}
