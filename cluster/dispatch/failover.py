"""One request's answer, from as many replicas as necessary: if one dies, another continues.

The tokens that were sent are kept as ids (`cluster.core.stream.Progress`), eight bytes each. The other replica gets
them and generates what follows. A request without output yet is run again from its beginning. A request is quarantined
(``blame``) after two deaths, or after one if the replica reports that the request crashed its engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, Self, TypeVar

from cluster.api.openai import SSE_DONE, ErrorMap
from cluster.core.errors import HttpError, Overloaded, Quarantined, ReplicaLost
from cluster.core.stream import Progress, StreamChunk, joined
from cluster.core.turn_tokens import TurnTokens

logger = logging.getLogger("ray.serve")

Data = TypeVar("Data")

ATTEMPTS = 2
"""Number of replica deaths after which a request is rejected."""

DEAD_ON_ARRIVAL_ATTEMPTS = 20
"""Largest number of attempts that may meet a replica that was dead before the request."""

DEAD_ON_ARRIVAL_WAIT_S = 0.1
"""Seconds to wait before each further attempt."""

ROOM_ATTEMPTS = 180
"""Largest number of attempts, after a death, to find a replica with room. It suffices for the dead one to be replaced.
"""

ROOM_WAIT_S = 1.0
"""Seconds to wait before each of these attempts."""

_finishing: set[asyncio.Task[None]] = set()
"""Tasks that read calls to their end after the last piece."""


def ends_answer(data: bytes) -> bool:
    """Return whether this piece is the last of an answer: the end of a stream, or an answer that is no stream."""
    return data.endswith(SSE_DONE) or data.startswith(b"{")


class Answers(Protocol):
    """A replica's answer in pieces, as Ray Serve's DeploymentResponseGenerator yields them."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> object:
        """Return a StreamChunk, bytes (an answer that is no stream), or an HttpError."""
        ...

    def cancel(self) -> None:
        """Stop the replica's work on it. After the end this does nothing."""
        ...

    def over(self) -> None:
        """Record that the last piece has come. A second call does nothing."""
        ...


class Attempt(Protocol):
    """Starts one attempt at the answer: it chooses a replica and sends it the request."""

    async def __call__(self, resume_state: Progress | None) -> Answers:
        """Call a replica for the answer, or for the rest of it after a state.

        A further call follows the death of the replica that was chosen before, and should choose another.
        """
        ...


class FailoverStream(Generic[Data]):
    """Iterates over the pieces of one answer.

    Args:
        attempt: calls a replica.
        ends: whether a piece is the last of the answer.
        error_map: maps each exception to an HttpError.
        blame: called when the request is quarantined.
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
        self._steps: list[Progress] = []
        self.output_tokens = 0
        """Number of tokens that have been output."""
        self.prompt_tokens: int | None = None
        """Number of prompt tokens of an answer that is no stream, at its end."""
        self.alone_s: float | None = None
        """See `cluster.core.slo.TurnRecord.alone_s`."""
        self._over = False
        self.record: TurnTokens | None = None
        """The tokens of the whole turn, at its end, if they are recorded."""
        self._deaths = 0
        self._dead_on_arrival = 0
        self._without_room = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Data | HttpError:
        """Return the next piece. An HttpError is the last one.

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
                if await self._wait_for_room():
                    continue
                answer = ReplicaLost("the replica died, and no other takes its work")
            if isinstance(answer, HttpError):
                self._over = True
                return answer
            if isinstance(answer, StreamChunk):
                self._steps.append(answer.progress)
                self.record = answer.progress.record or self.record
                self.output_tokens += answer.progress.output_tokens
                self.prompt_tokens = answer.progress.prompt_tokens
                alone_s = answer.progress.alone_s
                self.alone_s = self.alone_s if alone_s is None else alone_s
                data: Data = answer.data
                if not data:
                    continue
                self._over = self._ends(data)
                return data
            self._over = True
            return answer  # type: ignore[return-value]
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Stop the replica's work on the answer. A call whose last piece has come is left to end by itself."""
        if self._answers is None:
            return
        if self._over:
            self._answers.over()  # the call may break or hang before it ends
            _finishing.add(task := asyncio.create_task(_exhaust(self._answers)))
            task.add_done_callback(_finishing.discard)
            self._answers = None
        else:
            self._answers.cancel()

    async def _next(self) -> object:
        try:
            if self._answers is None:
                self._answers = await self._attempt(joined(self._steps) if self._steps else None)
            return await anext(self._answers)
        except StopAsyncIteration:
            return ReplicaLost("the replica ended before its answer was complete")
        except Exception as error:
            mapped = self._error_map(error)
            if isinstance(mapped, ReplicaLost) or (isinstance(mapped, Overloaded) and self._deaths):
                return mapped
            raise

    async def _lost(self, loss: ReplicaLost) -> HttpError | None:
        """Return the error for the client, or None if another replica is to be called."""
        self._give_up()
        if not loss.at_work:
            self._dead_on_arrival += 1
            if self._dead_on_arrival >= DEAD_ON_ARRIVAL_ATTEMPTS:
                return loss
            await asyncio.sleep(DEAD_ON_ARRIVAL_WAIT_S)
            return None
        self._deaths += 1
        progress = joined(self._steps)
        if loss.culprit or self._deaths >= ATTEMPTS:
            await self._blame()
            died = "a replica died of" if loss.culprit else f"{ATTEMPTS} replicas died under"
            return Quarantined(f"{died} this request; it is rejected now", code="quarantined")
        if self._steps and progress.begun is not None and progress.begun.obstacle is not None:
            return ReplicaLost(f"{loss.message}; no other can go on with a stream with {progress.begun.obstacle}")
        logger.warning("%s; another goes on after %d events", loss.message, progress.events)
        return None

    async def _wait_for_room(self) -> bool:
        """Wait because no replica has room to continue. Return False if the request has waited long enough."""
        self._give_up()
        self._without_room += 1
        if self._without_room >= ROOM_ATTEMPTS:
            return False
        await asyncio.sleep(ROOM_WAIT_S)
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
