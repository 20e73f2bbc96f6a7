"""A turn's call of its replica. The turn is placed again if that replica is gone.

`cluster.dispatch.failover` continues a turn whose replica dies while it works on it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import uuid4

from cluster.core.errors import HttpError, Overloaded, ProgramMoved, ReplicaGone
from cluster.core.program import ProgramIdentity
from cluster.core.replica_snapshot import prefix_blocks, prompt_of, salt_of
from cluster.core.stream import Progress
from router.decisions import TurnRequest
from router.placement import Placement, Placer

MAX_HOPS = 16
"""Number of times that a request is placed again because its replica is gone, or its program has moved."""
BYTES_PER_TOKEN = 4
IMAGE_TOKENS = 1500
"""Number of tokens that an image is estimated to be. Anthropic's documentation names about 1,600 for the largest image
that is not made smaller; vLLM's Qwen2.5-VL makes 1,369 of 1,024 x 1,024 pixels.
"""

Piece = TypeVar("Piece")
Output = TypeVar("Output", covariant=True)


class Calls(Protocol[Output]):
    """The pieces of an answer, as Ray Serve's DeploymentResponseGenerator yields them."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Output: ...

    def cancel(self) -> None:
        """Stop the replica's work on it. After the end this does nothing."""
        ...


def turn_request(identity: ProgramIdentity, body: Mapping[str, Any], tokens: int | None = None) -> TurnRequest:
    """Return the router's request for a turn.

    ``tokens``: its `prompt_tokens`, where they have been counted.
    """
    key = identity.key
    return TurnRequest(
        key=key if key is not None else f"{identity.tenant}//{uuid4().hex}",  # two slashes: no program's key
        tenant=identity.tenant,
        prompt_tokens=prompt_tokens(body) if tokens is None else tokens,
        prefix=prefix_blocks(prompt_of(body), salt_of(body)),
        single_turn=key is None,
        first=identity.first_turn,
        last=identity.last_turn,
        parent_key=identity.parent_key,
        hints=identity.hints,
        forecast=identity.forecast,
    )


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Return the number of prompt tokens of a request.

    It is exact for token ids. Otherwise it is estimated from the bytes of the text and the number of images.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return len(prompt)
    return sum(_text_bytes(body.get(field)) for field in ("prompt", "tools", "messages")) // BYTES_PER_TOKEN


class PlacedStream(Generic[Piece]):
    """The pieces of a turn's answer. Its placement ends with the answer, by `over`, or by `cancel`.

    Until the first piece has come, the turn is placed again if the call did not reach the replica, or if the replica
    knows a later home of the program.

    Args:
        placer: places the turn.
        request: the turn's request for a placement.
        call: makes the call for a placement.
    """

    def __init__(self, placer: Placer, request: TurnRequest, call: Callable[[Placement], Calls[Piece]]) -> None:
        self._placer = placer
        self._request = request
        self._call = call
        self._placement: Placement | None = None
        self._answers: Calls[Piece] | None = None
        self._failed = False
        self._full = False

    @property
    def elsewhere(self) -> TurnRequest:
        """The turn's request for another replica than those that have failed it. One that is full has not."""
        if self._placement is None or self._full:
            return self._request
        return replace(self._request, avoid=self._request.avoid | {self._placement.session})

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        if self._answers is None:
            return await self._begin()
        return self._check(await self._next(self._answers))

    def over(self, *, context_tokens: int | None = None) -> None:
        """End the placement, and leave the call to end by itself. A second call does nothing."""
        if self._placement is not None:
            self._placement.end(context_tokens=context_tokens, complete=not self._failed)

    def cancel(self) -> None:
        """Stop the replica's work on it. After the end this does nothing."""
        if self._answers is not None:
            self._answers.cancel()
        if self._placement is not None:
            self._placement.end()

    async def _begin(self) -> Piece:
        for hop in range(MAX_HOPS + 1):
            self._placement = placement = await self._placer.place(self._request)
            answers = self._answers = self._call(placement)
            try:
                piece = await self._next(answers)
            except ReplicaGone:
                if hop == MAX_HOPS:
                    raise
                self._request = self.elsewhere
            else:
                if not isinstance(piece, ProgramMoved) or hop == MAX_HOPS:
                    return self._check(piece)
                await self._placer.fenced(placement, piece.epoch)
            placement.end()
        raise AssertionError("the last hop returns or raises")

    async def _next(self, answers: Calls[Piece]) -> Piece:
        try:
            return await anext(answers)
        except StopAsyncIteration:
            self.over()
            raise

    def _check(self, piece: Piece) -> Piece:
        if isinstance(piece, HttpError):
            self._failed = True
            self._full = isinstance(piece, Overloaded)
            self.over()
        return piece


class FailoverAttempts:
    """Calls a replica for a turn's answer, and another one after its death: a `cluster.dispatch.failover.Attempt`.

    Args:
        placer: places the turn.
        request: makes the turn's request, once it has its prediction.
        call: makes the call for a placement and the state from which to resume.
        check: called before each attempt. It raises to reject the turn.
    """

    def __init__(
        self,
        placer: Placer,
        request: Callable[[], Awaitable[TurnRequest]],
        call: Callable[[Placement, Progress | None], Calls[Any]],
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self._placer = placer
        self._request = request
        self._call = call
        self._check = check
        self._last: PlacedStream[Any] | None = None

    async def __call__(self, resume_state: Progress | None) -> PlacedStream[Any]:
        """Call a replica that has not failed this turn."""
        await self._check()
        request = await self._request() if self._last is None else self._last.elsewhere
        call = self._call  # a lambda with `self` would make a reference cycle with the answers
        self._last = PlacedStream(self._placer, request, lambda placement: call(placement, resume_state))
        return self._last

    def over(self, *, context_tokens: int) -> None:
        """Record that the turn has ended without a failure."""
        if self._last is not None:
            self._last.over(context_tokens=context_tokens)


def _text_bytes(value: object) -> int:
    """Return the bytes of all text in a JSON value, where an image counts as the text of as many tokens. Its depth is
    bounded where bodies are read.
    """
    match value:
        case str():
            return len(value.encode("utf-8", "surrogatepass"))
        case list():
            return sum(map(_text_bytes, value))
        case {"image_url": str() | {"url": str()}}:
            return IMAGE_TOKENS * BYTES_PER_TOKEN
        case dict():
            return sum(map(_text_bytes, value.values()))
    return 0
