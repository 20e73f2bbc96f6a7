"""The replicas as a program runner sees them: turns and the side channel, over a handle of Ray Serve."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

from ray.serve.handle import DeploymentHandle

from cluster.errors import HttpError
from cluster.http_front import REQUEST_ID
from cluster.program import ProgramIdentity
from cluster.ray_errors import as_http_error
from cluster.turn import Continuation, TurnDone, TurnPiece

logger = logging.getLogger("ray.serve")


class ReplicaCalls:
    """Calls that reach the replica on which a program lives.

    Args:
        replicas: a handle to `ProgramServer`.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._streams = replicas.options(stream=True)
        self._calls = replicas.options(stream=False)
        self._ending: set[asyncio.Task[None]] = set()

    async def turn(
        self, key: str, body: Mapping[str, Any], identity: ProgramIdentity, continuation: Continuation | None
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """The pieces of a turn; the last one says why, if it failed. Closing the iterator stops the replica's work.

        The last piece does not wait for the replica's own end of the call.
        """
        headers = {REQUEST_ID: uuid4().hex}
        handle = self._streams.options(session_id=key)
        answers = handle.turn.remote(dict(body), headers, key, identity.encode(), continuation)
        over = False
        try:
            async for batch in answers:
                over = isinstance(batch[-1], TurnDone | HttpError)
                for piece in batch:
                    yield piece
                if over:
                    break
        except Exception as error:  # noqa: BLE001 - the boundary: Ray's exceptions end here
            yield as_http_error(error)
        finally:
            if over:
                self._ending.add(task := asyncio.create_task(_exhaust(answers)))
                task.add_done_callback(self._ending.discard)
            else:
                answers.cancel()

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel.

        Raises:
            Exception: what Ray or the replica raised.
        """
        await self._calls.options(session_id=key).control.remote(operation, {"key": key, **payload})


async def _exhaust(answers: Any) -> None:
    """Let a call end by itself, whose last piece is here."""
    try:
        async for _ in answers:
            pass
    except Exception as error:  # noqa: BLE001 - nobody waits for it
        logger.debug("a turn's call, after its last piece: %s", error)
