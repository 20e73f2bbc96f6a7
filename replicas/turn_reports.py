"""The direct data plane: the router that placed a turn is told when it is over, for its answer does not pass there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.direct_note import NOTE, RouterNote

logger = logging.getLogger("ray.serve")

GATHER_S = 0.05
"""Turns that end within so long are told together."""
PERIOD_S = 5.0
"""How often it is told which turns are under way."""

SCOPE_KEY = "caesura.note"
"""Where in the ASGI scope the router's note is."""

Ended = Sequence[tuple[str, bool]]
Tell = Callable[[Ended, Sequence[str] | None], Awaitable[None]]
"""Of turns that are over, each with whether it came to its proper end; and of those under way, None if that is not
told."""


class TurnReports:
    """Which turns this replica was brought, until the router knows that they are over.

    Args:
        tell: tells the router; what fails is told again.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._open: set[str] = set()
        self._ended: list[tuple[str, bool]] = []
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def began(self, turn: str) -> None:
        """A turn has arrived."""
        self._open.add(turn)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def ended(self, turn: str, *, complete: bool) -> None:
        """It is over."""
        self._open.discard(turn)
        self._ended.append((turn, complete))
        self._stirred.set()

    async def aclose(self) -> None:
        """Stop telling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._stirred.wait()
            except TimeoutError:
                there: list[str] | None = sorted(self._open)
            else:
                there = None
                await asyncio.sleep(GATHER_S)
            self._stirred.clear()
            ended, self._ended = self._ended, []
            try:
                await self._tell(ended, there)
            except Exception as error:  # noqa: BLE001 - the router may be starting again; it gives the turns up by itself
                logger.warning("the router was not told of %s turns: %s", len(ended), error)


class ReportedTurns:
    """Pure ASGI middleware: reads the router's note, and reports the turn that it names."""

    def __init__(self, app: ASGIApp, *, reports: TurnReports) -> None:
        self._app = app
        self._reports = reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = scope[SCOPE_KEY] = note_of(scope)
        if note.turn is None:
            await self._app(scope, receive, send)
            return
        served = False

        async def observe(message: Message) -> None:
            nonlocal served
            if message["type"] == "http.response.start":
                served = message["status"] < 400
            await send(message)

        self._reports.began(note.turn)
        returned = False
        try:
            await self._app(scope, receive, observe)
            returned = True
        finally:
            self._reports.ended(note.turn, complete=returned and served)


def note_of(scope: Scope) -> RouterNote:
    """The router's note; an empty one for a request that did not come through it."""
    try:
        return RouterNote.decode(dict(scope["headers"]).get(NOTE.encode(), b"").decode("latin-1"))
    except ValueError:
        return RouterNote()
