"""What routes share that begin a program: its bounds, its Idempotency-Key, its stream, and a client that goes away."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from cluster.api.sse import EventStream as EventStream
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, RunStoreUnavailable
from cluster.core.tools import ToolOffer
from cluster.runs.events import Limits
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.records import Idempotency

logger = logging.getLogger("ray.serve")

IDEMPOTENCY_KEY = "idempotency-key"
MAX_KEY_LENGTH = 255


Offers = Callable[[str, Mapping[str, Any] | None], Awaitable[Sequence[ToolOffer]]]
"""The tools that are known now, with those that a request brings. Raises ToolRefused where these cannot be used."""


class Abandon:
    """Cancels runs whose client has gone; without waiting, since whoever calls this is being stopped itself.

    Args:
        runner: has the runs.
    """

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner
        self._cancelling: set[asyncio.Task[None]] = set()

    def __call__(self, run_id: str) -> None:
        """Cancel this one soon."""
        task = asyncio.create_task(self._cancel(run_id))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel(self, run_id: str) -> None:
        try:
            await self._runner.cancel(run_id)
        except RunStoreUnavailable as error:
            logger.warning("%s, whose client has gone, could not be cancelled: %s", run_id, error)


def limits(config: CaesuraConfig) -> Limits:
    """What the operator allows a run."""
    programs = config.programs
    return Limits(
        turns=programs.max_turns,
        tool_calls=programs.max_tool_calls,
        output_tokens=programs.max_output_tokens,
        wall_s=programs.max_wall_s,
        turn_attempts=programs.turn_attempts,
    )


def read_idempotency(http: Request, api: str, body: Mapping[str, Any]) -> Idempotency | None:
    """The request's Idempotency-Key with the fingerprint of its body; None without one.

    Raises:
        BadRequest: the key cannot be used.
    """
    key = http.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        message = f"an Idempotency-Key has 1 to {MAX_KEY_LENGTH} printable characters"
        raise BadRequest(message, param="Idempotency-Key")
    text = json.dumps([api, body], sort_keys=True, separators=(",", ":"))
    return Idempotency(key, hashlib.sha256(text.encode()).digest())


def described(one: ToolOffer) -> dict[str, Any]:
    """A tool in plain values."""
    return {"name": one.name, "description": one.description, "parameters": one.parameters}
