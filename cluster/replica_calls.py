"""The replicas of a model as the rest of an ingress sees them: calls over a handle, each to its replica."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from uuid import uuid4

from ray.serve.handle import DeploymentHandle

from cluster.errors import ControlTimeout, HttpError
from cluster.forecasting import Forecasts, ForeseenTurn, NoForecasts, WatchedAnswers
from cluster.http_front import REQUEST_ID
from cluster.observing.tracing import NoTraces, Traces, WatchedTurn, with_trace
from cluster.placed_calls import Attempts, Calls, turn_request
from cluster.program import ProgramIdentity
from cluster.quarantine import Quarantine, digest_of
from cluster.ray_errors import as_http_error, is_loss
from cluster.stream import Progress
from cluster.stream_relay import Relay, ends_stream
from cluster.turn import Continuation, TurnDone, TurnPiece
from router.decisions import TurnRequest
from router.places import Placement, Places

BROADCAST_SLACK_S = 5.0
"""A broadcast may take so much longer than one call."""


class ReplicaCalls:
    """Calls that reach the replica on which a program lives, a replica by its id, or all.

    Args:
        replicas: a handle to `ProgramServer`.
        places: where programs live.
        quarantine: turns that are refused.
        timeout_s: bounds a call of the side channel.
        forecasts: what is expected of turns.
        traces: are told of turns.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        places: Places,
        quarantine: Quarantine,
        timeout_s: float,
        forecasts: Forecasts | NoForecasts,
        traces: Traces | NoTraces | None = None,
    ) -> None:
        self._streams = replicas.options(stream=True)
        self._calls = replicas.options(stream=False)
        self._places = places
        self._quarantine = quarantine
        self._timeout_s = timeout_s
        self._forecasts = forecasts
        self._traces = traces or NoTraces()

    # --- turns --------------------------------------------------------------------------------------------------------

    def answers(
        self, method: str, body: dict[str, Any], headers: dict[str, str], identity: ProgramIdentity
    ) -> WatchedAnswers:
        """A turn of a client: what it is sent, as bytes; where a replica dies, another goes on."""
        turn = self._turn(method, identity, body)

        def call(whose: ProgramIdentity, placement: Placement, so_far: Progress | None) -> Calls[Any]:
            turn.placed(placement.session, placement.reason)
            handle = self._streams.options(session_id=placement.session)
            arguments = (method, body, with_trace(headers, whose), whose.key, whose.encode(), placement.epoch, so_far)
            made: Calls[Any] = handle.answer.remote(*arguments)
            return made

        _, relay = self._relay(method, body, identity, turn, call, ends_stream)
        return WatchedAnswers(relay, turn)

    def _turn(self, method: str, identity: ProgramIdentity, body: Mapping[str, Any]) -> WatchedTurn:
        expected = self._forecasts.turn(identity, body)
        return self._traces.turn(expected, method, str(body.get("model")), identity)

    def _relay(
        self,
        method: str,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        turn: ForeseenTurn,
        call: Callable[[ProgramIdentity, Placement, Progress | None], Calls[Any]],
        ends: Callable[[Any], bool],
    ) -> tuple[Attempts, Relay[Any]]:
        digest = digest_of(method, identity.tenant, body)
        quarantine = self._quarantine
        whose = identity

        async def request() -> TurnRequest:
            nonlocal whose
            whose = await turn.identity()
            return turn_request(whose, body)

        attempts = Attempts(
            self._places,
            request,
            lambda placement, so_far: call(whose, placement, so_far),
            lambda: quarantine.check(digest),
        )
        return attempts, Relay(attempts, ends=ends, error_map=as_http_error, blame=lambda: quarantine.add(digest))

    def plain(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> Calls[bytes | HttpError]:
        """What is no turn: any replica answers."""
        made: Calls[bytes | HttpError] = self._streams.answer.remote(method, body, headers, None, None)
        return made

    async def turn(
        self, key: str, body: Mapping[str, Any], identity: ProgramIdentity, continuation: Continuation | None
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """The pieces of a turn; the last one says why, if it failed. Closing the iterator stops the replica's work.

        Where a replica dies, another goes on. The last piece does not wait for the replica's own end of the call.
        """
        headers = {REQUEST_ID: uuid4().hex}
        turn = self._turn("turn", identity, body)

        def call(whose: ProgramIdentity, placement: Placement, so_far: Progress | None) -> Calls[Any]:
            turn.placed(placement.session, placement.reason)
            handle = self._streams.options(session_id=placement.session)
            arguments = (
                dict(body),
                with_trace(headers, whose),
                key,
                whose.encode(),
                continuation,
                placement.epoch,
                so_far,
            )
            made: Calls[Any] = handle.turn.remote(*arguments)
            return made

        attempts, relay = self._relay("turn", body, identity, turn, call, _ends_turn)
        try:
            async for batch in relay:
                if isinstance(batch, HttpError):
                    yield batch
                    break
                if isinstance(last := batch[-1], TurnDone):
                    attempts.over(context_tokens=last.prompt_tokens + last.output_tokens)
                    turn.over(output_tokens=last.output_tokens, prompt_tokens=last.prompt_tokens)
                for piece in batch:
                    yield piece
        except Exception as error:  # noqa: BLE001 - the boundary: Ray's exceptions end here
            yield as_http_error(error)
        finally:
            relay.cancel()
            turn.over(output_tokens=None)

    # --- the side channel ---------------------------------------------------------------------------------------------

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel where the program lives; nothing is done if it lives nowhere.

        Raises:
            Exception: what Ray or the replica raised.
        """
        session = await self._places.session_of(key)
        if session is None:
            return
        try:
            await self._calls.options(session_id=session).control.remote(operation, {"key": key, **payload})
        finally:
            if operation == "end":
                self._places.forget(key)

    async def story(self, key: str) -> dict[str, Any] | None:
        """What the replicas know of a program: first the one where it lives.

        Raises:
            ControlTimeout: they did not answer.
        """
        session = await self._places.session_of(key, fresh=True)
        try:
            if session is not None:
                async with asyncio.timeout(self._timeout_s):
                    story: dict[str, Any] = await self._calls.options(session_id=session).program_story.remote(key)
                if story:
                    return story
        except TimeoutError as error:
            raise ControlTimeout(f"the replica of program {key!r} did not answer") from error
        except Exception as error:
            if not is_loss(error):
                raise
        others = await self.broadcast("program_story", key)
        return next((other for other in others if isinstance(other, dict) and other), None)

    async def to(self, replica: str, method: str, *arguments: Any) -> Any:
        """Call a replica by its id.

        Raises:
            ReplicaGone: it is not there.
            Exception: what else Ray or the replica raised.
        """
        return await getattr(self._calls.options(session_id=replica), method).remote(*arguments)

    async def ready(self) -> None:
        """Returns when a replica has answered; raises what keeps it from doing so."""
        await self._calls.ready.remote()

    async def broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """What each replica answers, or the exception that it raised.

        Raises:
            ControlTimeout: not all answered in time.
        """
        timeout_s = self._timeout_s + BROADCAST_SLACK_S
        call = self._calls.broadcast(method, *arguments)
        try:
            answers: list[Any] = await call.results_async(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError as error:
            raise ControlTimeout(f"{method}: not all replicas answered within {timeout_s} s") from error
        return answers


def _ends_turn(pieces: tuple[TurnPiece, ...]) -> bool:
    return isinstance(pieces[-1], TurnDone)
