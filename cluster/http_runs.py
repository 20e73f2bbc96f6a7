"""What routes share that begin a program: its bounds, its Idempotency-Key, its stream, and a client that goes away."""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.config import CaesuraConfig
from cluster.errors import BadRequest, RunStoreUnavailable
from cluster.http_calls import EVENT_STREAM_HEADERS
from cluster.http_watch import ClientGone, unless_gone
from cluster.program_runner import ProgramRunner
from cluster.run_events import Limits
from cluster.run_log import Idempotency

logger = logging.getLogger("ray.serve")

IDEMPOTENCY_KEY = "idempotency-key"
MAX_KEY_LENGTH = 255


class ToolOffered(Protocol):
    """A tool that is known to the tool runtime: `cluster.tools.ToolOffer`."""

    @property
    def name(self) -> str:
        """As programs call it."""
        ...

    @property
    def description(self) -> str:
        """For the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema."""
        ...

    @property
    def owner(self) -> str:
        """The entry of the configuration or of the request that it belongs to."""
        ...

    @property
    def read_only(self) -> bool:
        """Its server says that it changes nothing."""
        ...

    @property
    def own_name(self) -> str | None:
        """As its server calls it, if it has one."""
        ...


Offers = Callable[[str, Mapping[str, Any] | None], Awaitable[Sequence[ToolOffered]]]
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


class EventStream(Response):
    """Server-sent events.

    Args:
        pieces: the bytes.
        on_gone: called if the client goes away before the end; None: nobody has to know.
    """

    def __init__(self, pieces: AsyncIterator[bytes], on_gone: Callable[[], None] | None) -> None:
        super().__init__()
        self._pieces = pieces
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self._tell()
        except BaseException:  # whatever ends this task or the connection: the client gets no more
            self._tell()
            raise

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        async with aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _tell(self) -> None:
        if self._on_gone is not None:
            self._on_gone()


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


def described(one: ToolOffered) -> dict[str, Any]:
    """A tool in plain values."""
    return {"name": one.name, "description": one.description, "parameters": one.parameters}


def listed(one: ToolOffered) -> dict[str, Any]:
    """A server's tool in plain values, by the server's own name."""
    return {**described(one), "name": one.own_name or one.name, "read_only": one.read_only}
