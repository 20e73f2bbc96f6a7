"""Turns that the router brought to a replica in the direct data plane: the replica reports their ends to the router."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.direct.note import NOTE, RouterNote

logger = logging.getLogger("ray.serve")

GATHER_S = 0.05
"""Turns that end within this time are reported together."""
PERIOD_S = 5.0
"""How often the turns that are under way are reported."""
RETRY_S = 1.0
"""After a report that failed, the next one is sent after this time."""
MAX_UNREPORTED = 65_536
"""Ends that are kept for a router that does not answer. Of more, the oldest are dropped: the router times them out."""

SCOPE_KEY = "caesura.note"
"""Where in the ASGI scope the router's note is."""

Ended = Sequence[tuple[str, bool]]
Report = Callable[[Ended, Sequence[str] | None], Awaitable[None]]
"""Sends the turns that are over, each with whether it completed; and the turns under way, None if they are left out."""


class TurnReports:
    """The turns that the router brought to this replica, until the router has their ends.

    An end may be reported twice, when the answer to the first report was lost. The router ignores the second.

    Args:
        report: sends a report to the router. What fails is kept and sent again.
        limit: bounds the ends that are kept.
        retry_s: the wait after a report that failed.
        period_s: how often the turns under way are listed.
    """

    def __init__(
        self, report: Report, *, limit: int = MAX_UNREPORTED, retry_s: float = RETRY_S, period_s: float = PERIOD_S
    ) -> None:
        self._report = report
        self._period_s = period_s
        self._retry_s = retry_s
        self._open: set[str] = set()
        self._ended: deque[tuple[str, bool]] = deque(maxlen=limit)
        self._some_ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def began(self, turn: str) -> None:
        """A turn has arrived."""
        self._open.add(turn)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def ended(self, turn: str, *, complete: bool) -> None:
        """A turn is over."""
        self._open.discard(turn)
        self._ended.append((turn, complete))
        self._some_ended.set()

    async def aclose(self) -> None:
        """Send no more reports."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        now_s = asyncio.get_running_loop().time
        listed_s = now_s()
        while True:
            try:
                async with asyncio.timeout_at(listed_s + self._period_s):
                    await self._some_ended.wait()
                    await asyncio.sleep(GATHER_S)
            except TimeoutError:
                pass
            # A busy replica has ends to report all the time; the list of what is under way must not wait for a pause.
            under_way = sorted(self._open) if now_s() >= listed_s + self._period_s else None
            self._some_ended.clear()
            ended = list(self._ended)
            self._ended.clear()
            try:
                await self._report(ended, under_way)
            except Exception as error:  # noqa: BLE001 - the router may be starting again
                logger.warning("a report of %s turns to the router failed: %s", len(ended), error)
                self._keep(ended)
                await asyncio.sleep(self._retry_s)
            else:
                listed_s = listed_s if under_way is None else now_s()

    def _keep(self, unreported: list[tuple[str, bool]]) -> None:
        """Put ends back before those that came meanwhile."""
        ends = [*unreported, *self._ended]
        self._ended.clear()
        self._ended.extend(ends)
        if ends:
            self._some_ended.set()


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
