"""Calls of one model's replicas, each to the right replica: turns by HTTP, control calls by their Serve handle."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any
from uuid import uuid4

from msgspec.structs import replace
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.api.openai import REQUEST_ID
from cluster.api.ray_errors import as_http_error, is_loss
from cluster.core.errors import ControlTimeout, HttpError
from cluster.core.frames import TURN, TurnCall
from cluster.core.program import ProgramIdentity
from cluster.core.stream import Progress
from cluster.core.turn import Continuation, TurnDone, TurnPiece
from cluster.core.turn_address import TurnAddress
from cluster.dispatch.failover import FailoverStream, ends_answer
from cluster.dispatch.placed_calls import Calls, FailoverAttempts, prompt_tokens, turn_request
from cluster.dispatch.predictions import NullPredictions, PredictedTurn, Predictions, WatchedAnswers, is_refusal
from cluster.dispatch.quarantine import Quarantine, digest_of
from cluster.dispatch.recording import RecordedAnswers, Recording, Recordings
from cluster.dispatch.turn_client import TurnClient
from cluster.observing.trace_context import NullTraces, TracedTurn, Traces, with_trace
from router.decisions import TurnRequest
from router.placement import Placement, Placer

BROADCAST_SLACK_S = 5.0
"""Seconds that a broadcast may take longer than one call."""
MAX_ADDRESSES = 4096
"""Largest number of replicas whose addresses are remembered, the gone ones included."""

NOT_HELD = "not_held"
"""The reason why the next prompt of a program without a home is not computed."""

MODEL_LEN_S = 1.0
"""Seconds within which a replica has to report the context window of its model. Otherwise a list of models lacks it."""

logger = logging.getLogger("ray.serve")


class ReplicaClient:
    """Calls the replica that a program is bound to, a replica by its id, or all replicas.

    Args:
        replicas: a handle to `ProgramServer`.
        turns: sends turns to replicas.
        placer: places turns.
        quarantine: the turns that are rejected.
        timeout_s: bounds each control call.
        predictions: predicts turns.
        traces: records turns.
        recordings: records the tokens of turns.
        may_have_none: whether the model may have no replica.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        turns: TurnClient,
        placer: Placer,
        quarantine: Quarantine,
        timeout_s: float,
        predictions: Predictions | NullPredictions,
        traces: Traces | None = None,
        recordings: Recordings | None = None,
        *,
        may_have_none: bool = False,
    ) -> None:
        self._may_have_none = may_have_none
        self._streams = replicas.options(stream=True)
        self._calls = replicas.options(stream=False)
        self._turns = turns
        self._addresses: dict[str, TurnAddress] = {}
        """Addresses by replica id. No id is used twice."""
        self._placer = placer
        self._quarantine = quarantine
        self._timeout_s = timeout_s
        self._predictions = predictions
        self._traces = traces or NullTraces()
        self._recordings = recordings
        self._max_model_len: int | None = None

    # --- turns --------------------------------------------------------------------------------------------------------

    def answers(
        self, method: str, body: dict[str, Any], headers: dict[str, str], identity: ProgramIdentity
    ) -> WatchedAnswers | RecordedAnswers:
        """Return the answer to a client's turn, as bytes. If a replica dies, another one continues the answer."""
        tokens = prompt_tokens(body)
        turn = self._turn(method, identity, body, tokens)
        recordings = self._recordings if identity.record is not None else None
        call = self._caller(TurnCall(method, body, headers, record=recordings is not None), turn)
        _, stream = self._failover_stream(method, body, identity, turn, tokens, call, ends_answer)
        answers = WatchedAnswers(stream, turn)
        return answers if recordings is None else RecordedAnswers(answers, recordings, method, body, headers, identity)

    def _turn(self, method: str, identity: ProgramIdentity, body: Mapping[str, Any], tokens: int) -> TracedTurn:
        expected = self._predictions.turn(identity, body, tokens)
        return self._traces.turn(expected, method, str(body.get("model")), identity)

    def _caller(
        self, call: TurnCall, turn: TracedTurn
    ) -> Callable[[ProgramIdentity, Placement, Progress | None], Calls[Any]]:
        """Return the function that sends a turn to the replica where it was placed."""

        def send(whose: ProgramIdentity, placement: Placement, resume_state: Progress | None) -> Calls[Any]:
            turn.placed(placement.session, placement.reason)
            placed = replace(
                call,
                headers=with_trace(call.headers, whose),
                key=call.key if call.key is not None else whose.key,
                identity=whose.encode(),
                epoch=placement.epoch,
                so_far=resume_state,
            )
            if placement.home is not None:
                return self._turns.call(placed, partial(self._address, placement.session))
            slot = self._streams.options(session_id=placement.session).slot.remote(call.body)
            return self._turns.call(placed, slot.__anext__, slot.cancel)

        return send

    async def _address(self, replica: str) -> TurnAddress:
        if (known := self._addresses.get(replica)) is not None:
            return known
        if len(self._addresses) >= MAX_ADDRESSES:
            self._addresses.clear()
        address: TurnAddress = await self._calls.options(session_id=replica).turn_address.remote()
        self._addresses[replica] = address
        return address

    def _failover_stream(
        self,
        method: str,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        turn: PredictedTurn,
        tokens: int,
        call: Callable[[ProgramIdentity, Placement, Progress | None], Calls[Any]],
        ends: Callable[[Any], bool],
    ) -> tuple[FailoverAttempts, FailoverStream[Any]]:
        quarantine = self._quarantine
        whose = identity

        @cache
        def digest() -> str:
            return digest_of(method, identity.tenant, body)

        async def request() -> TurnRequest:
            nonlocal whose
            whose = await turn.identity()
            return turn_request(whose, body, tokens)

        attempts = FailoverAttempts(
            self._placer,
            request,
            lambda placement, resume_state: call(whose, placement, resume_state),
            lambda: quarantine.check(digest),
        )
        return attempts, FailoverStream(
            attempts, ends=ends, error_map=as_http_error, blame=lambda: quarantine.add(digest())
        )

    async def plain(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        """Return the answer of any replica to a request that is no turn.

        Raises:
            HttpError: the replica rejected the request.
            Exception: what else Ray raised.
        """
        answer: bytes | HttpError = await self._calls.plain.remote(method, body, headers)
        if isinstance(answer, HttpError):
            raise answer
        return answer

    async def turn(
        self,
        key: str | None,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        continuation: Continuation | None,
        headers: Mapping[str, str] | None = None,
        answers: Sequence[int] | None = None,
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """Yield the pieces of a turn. If it fails, its last piece is the error. Closing the iterator stops the replica.

        If a replica dies, another one continues. The last piece does not wait for the end of the replica's call.

        Args:
            key: the program's key. None: the turn names no program.
            body: the body of a chat completion.
            identity: the identity of the turn's program.
            continuation: the token ids from which the turn continues. None: its prompt is rendered.
            headers: headers that vLLM may see, with a request id. None: only a new request id.
            answers: places of the messages that may be shortened if the prompt does not fit. None: no turn of a run.
        """
        tokens = prompt_tokens(body)
        turn = self._turn(TURN, identity, body, tokens)
        sent = {REQUEST_ID: uuid4().hex} if headers is None else dict(headers)
        recordings = self._recordings if identity.record is not None else None
        made = TurnCall(
            TURN,
            dict(body),
            sent,
            key=key,
            continuation=continuation,
            answers=None if answers is None else tuple(answers),
            record=recordings is not None,
        )
        call = self._caller(made, turn)
        attempts, stream = self._failover_stream(TURN, body, identity, turn, tokens, call, _ends_turn)
        recording: Recording | None = None
        try:
            if recordings is not None:
                recording = await recordings.begin(TURN, body, identity, sent[REQUEST_ID])
            async for batch in stream:
                if isinstance(batch, HttpError):
                    turn.over(output_tokens=None, refused=is_refusal(batch))
                    yield batch
                    break
                if isinstance(last := batch[-1], TurnDone):
                    if recording is not None:
                        await recording.finish(stream.record)
                    attempts.over(context_tokens=last.prompt_tokens + last.output_tokens)
                    turn.over(output_tokens=last.output_tokens, prompt_tokens=last.prompt_tokens)
                for piece in batch:
                    yield piece
        except Exception as error:  # noqa: BLE001 - the boundary: Ray's exceptions end here
            yield as_http_error(error)
        finally:
            stream.cancel()
            turn.over(output_tokens=None)
            if recording is not None:
                recording.drop()

    # --- control calls ------------------------------------------------------------------------------------------------

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel on the program's home. Do nothing if the program has no home.

        Raises:
            ControlTimeout: the replica did not answer in time. Whether it acted is unknown.
            Exception: what Ray or the replica raised.
        """
        session = await self._placer.session_of(key)
        if session is None:
            return
        try:
            await self.to(session, "control", operation, {"key": key, **payload})
        finally:
            if operation == "end":
                self._placer.forget(key)

    async def extend(self, key: str, body: Mapping[str, Any], continuation: Continuation | None) -> str | None:
        """Let the program's home compute its next prompt as far as it is known; see `replicas.early_prompt`.

        Return why nothing more is computed in this pause, or None.

        Raises:
            HttpError: the body cannot be read.
            ControlTimeout: the replica did not answer in time.
            Exception: what Ray raised.
        """
        session = await self._placer.session_of(key)
        if session is None:
            return NOT_HELD
        ended, error = await self.to(session, "extend", key, dict(body), continuation)
        if error is not None:
            raise error
        return None if ended is None else str(ended)

    async def story(self, key: str) -> dict[str, Any] | None:
        """Return what the replicas know of a program, or None. Its home is asked first.

        Raises:
            ControlTimeout: they did not answer.
        """
        session = await self._placer.session_of(key, fresh=True)
        try:
            if session is not None and (story := await self.to(session, "program_story", key)):
                known: dict[str, Any] = story
                return known
        except Exception as error:
            if not is_loss(error):
                raise
        others = await self.broadcast("program_story", key)
        return next((other for other in others if isinstance(other, dict) and other), None)

    async def to(self, replica: str, method: str, *arguments: Any) -> Any:
        """Call a replica by its id.

        Raises:
            ReplicaGone: it is not there.
            ControlTimeout: it did not answer in time. Whether it acted is unknown.
            Exception: what else Ray or the replica raised.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await getattr(self._calls.options(session_id=replica), method).remote(*arguments)
        except TimeoutError as error:
            raise ControlTimeout(f"{method}: replica {replica!r} did not answer within {self._timeout_s} s") from error

    async def ready(self) -> None:
        """Return when a replica has answered. Raise the error that prevents it."""
        await self._calls.ready.remote()

    async def max_model_len(self) -> int | None:
        """Return the model's context window in tokens, or None if no replica answers soon. It is asked for once."""
        if self._max_model_len is None:
            try:
                async with asyncio.timeout(MODEL_LEN_S):
                    self._max_model_len = int(await self._calls.max_model_len.remote())
            except Exception as error:  # noqa: BLE001 - a list of models does not fail for it
                logger.info("no replica has reported its context window: %r", error)
        return self._max_model_len

    async def broadcast(self, method: str, *arguments: Any, within_s: float | None = None) -> list[Any]:
        """Call all replicas. Return each one's answer, or the exception that it raised.

        ``within_s``: seconds in which they have to answer; None: those of a control call.

        Raises:
            ControlTimeout: not all answered in time.
        """
        timeout_s = (self._timeout_s if within_s is None else within_s) + BROADCAST_SLACK_S
        call = self._calls.broadcast(method, *arguments)
        try:
            answers: list[Any] = await call.results_async(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError as error:
            raise ControlTimeout(f"{method}: not all replicas answered within {timeout_s} s") from error
        except DeploymentUnavailableError:  # Ray raises it where there is no replica
            if not self._may_have_none:
                raise
            return []
        return answers


def _ends_turn(pieces: tuple[TurnPiece, ...]) -> bool:
    return isinstance(pieces[-1], TurnDone)
