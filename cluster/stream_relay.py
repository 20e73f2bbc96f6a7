"""One request's answer, from as many replicas as it takes: where one dies, another goes on.

What has been told is kept as ids (`cluster.stream.Progress`), eight bytes a token; the other replica is given them, and
says what comes after. A request of which nothing has been told is made again from its beginning. After two deaths, or
one of which the replica says that the request broke its engine, it is suspected (`Blame`), and not made again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, Self, TypeVar

from cluster.errors import HttpError, Overloaded, Quarantined, ReplicaLost
from cluster.http_errors import SSE_DONE, ErrorMap
from cluster.stream import Progress, Told, joined
from cluster.turn import ID_BYTES

logger = logging.getLogger("ray.serve")

Data = TypeVar("Data")

ATTEMPTS = 2
"""Replicas that may die under one request."""

STILLBORN_ATTEMPTS = 20
"""Replicas that may turn out to be dead already when they get a request."""

STILLBORN_WAIT_S = 0.1
"""Before another is asked, each time."""

SPARE_ATTEMPTS = 180
"""How often, after a death, it is asked whether another replica takes the request: until the dead one is replaced."""

SPARE_WAIT_S = 1.0
"""Before it is asked again."""

_ending: set[asyncio.Task[None]] = set()
"""Calls whose last piece has come."""


def ends_stream(data: bytes) -> bool:
    """Whether these server-sent events are a stream's last."""
    return data.endswith(SSE_DONE)


class Answers(Protocol):
    """What a replica answers, piece by piece: Ray Serve's DeploymentResponseGenerator."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> object:
        """Told, bytes (an answer that is no stream), or an HttpError."""
        ...

    def cancel(self) -> None:
        """Stop the replica's work on it; harmless after the end."""
        ...


class Attempt(Protocol):
    """How a replica is asked."""

    async def __call__(self, so_far: Progress | None) -> Answers:
        """Ask one for the answer, or for the rest of it.

        Called again after the death of the replica that it chose before: it should choose another.
        """
        ...


class Relay(Generic[Data]):
    """The pieces of one answer, as an iterator.

    Args:
        attempt: asks a replica.
        ends: whether a piece is the answer's last.
        error_map: what an exception means; total.
        blame: called when the request has cost two replicas.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        ends: Callable[[Data], bool],
        error_map: ErrorMap,
        blame: Callable[[], Awaitable[None]],
    ) -> None:
        self._attempt = attempt
        self._ends = ends
        self._error_map = error_map
        self._blame = blame
        self._answers: Answers | None = None
        self._told: list[Progress] = []
        self._told_bytes = 0
        """Of their ids."""
        self._over = False
        self._deaths = 0
        self._stillborn = 0
        self._refused = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Data | HttpError:
        """The next piece; an HttpError is the last.

        Raises:
            Exception: what the call raised, unless a replica's death was the reason.
        """
        while not self._over:
            answer = await self._next()
            if isinstance(answer, ReplicaLost):
                refusal = await self._lost(answer)
                if refusal is None:
                    continue
                answer = refusal
            elif isinstance(answer, Overloaded) and self._deaths:
                if await self._spared():
                    continue
                answer = ReplicaLost("the replica died, and no other takes its work")
            if isinstance(answer, HttpError):
                self._over = True
                return answer
            if isinstance(answer, Told):
                self._told.append(answer.progress)
                self._told_bytes += len(answer.progress.token_ids)
                data: Data = answer.data
                if not data:
                    continue
                self._over = self._ends(data)
                return data
            self._over = True
            return answer  # type: ignore[return-value]
        raise StopAsyncIteration

    @property
    def output_tokens(self) -> int:
        """Of a stream, that have been told."""
        return self._told_bytes // ID_BYTES

    def cancel(self) -> None:
        """Stop the replica's work on it. A call whose last piece is here is left to end by itself."""
        if self._answers is None:
            return
        if self._over:
            _ending.add(task := asyncio.create_task(_exhaust(self._answers)))
            task.add_done_callback(_ending.discard)
            self._answers = None
        else:
            self._answers.cancel()

    async def _next(self) -> object:
        try:
            if self._answers is None:
                self._answers = await self._attempt(joined(self._told) if self._told else None)
            return await anext(self._answers)
        except StopAsyncIteration:
            return ReplicaLost("the replica ended before its answer was complete")
        except Exception as error:
            told = self._error_map(error)
            if isinstance(told, ReplicaLost) or (isinstance(told, Overloaded) and self._deaths):
                return told
            raise

    async def _lost(self, loss: ReplicaLost) -> HttpError | None:
        """What the client is told; None: nothing, another replica is asked."""
        self._give_up()
        if not loss.at_work:
            self._stillborn += 1
            if self._stillborn >= STILLBORN_ATTEMPTS:
                return loss
            await asyncio.sleep(STILLBORN_WAIT_S)
            return None
        self._deaths += 1
        so_far = joined(self._told)
        if loss.culprit or self._deaths >= ATTEMPTS:
            await self._blame()
            died = "a replica died of" if loss.culprit else f"{ATTEMPTS} replicas died under"
            return Quarantined(f"{died} this request; it is refused now", code="quarantined")
        if self._told and so_far.begun is not None and so_far.begun.obstacle is not None:
            return ReplicaLost(f"{loss.message}; no other can go on with a stream with {so_far.begun.obstacle}")
        logger.warning("%s; another goes on after %d events", loss.message, so_far.events)
        return None

    async def _spared(self) -> bool:
        """Wait, as no replica has room for what another had begun; False: it has waited long enough."""
        self._give_up()
        self._refused += 1
        if self._refused >= SPARE_ATTEMPTS:
            return False
        await asyncio.sleep(SPARE_WAIT_S)
        return True

    def _give_up(self) -> None:
        if self._answers is not None:
            self._answers.cancel()
            self._answers = None


async def _exhaust(answers: Answers) -> None:
    try:
        async for _ in answers:
            pass
    except Exception as error:  # noqa: BLE001 - nobody waits for it
        logger.debug("a call, after its last piece: %s", error)
