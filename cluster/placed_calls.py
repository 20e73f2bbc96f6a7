"""A turn's call of a replica, placed: it goes where its program lives, and elsewhere if that replica is gone.

What becomes of a turn whose replica dies while it works on it: `cluster.stream_relay`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import uuid4

from cluster.errors import HttpError, ProgramMoved, ReplicaGone
from cluster.program import ProgramIdentity
from cluster.routing import prefix_blocks, prompt_of, salt_of
from cluster.stream import Progress
from router.decisions import TurnRequest
from router.places import Placement, Places

MAX_HOPS = 16
"""How often a request is placed again because its replica is gone, or its program has moved."""
BYTES_PER_TOKEN = 4

Piece = TypeVar("Piece")
Said = TypeVar("Said", covariant=True)


class Calls(Protocol[Said]):
    """The pieces of an answer: Ray Serve's DeploymentResponseGenerator."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Said: ...

    def cancel(self) -> None:
        """Stop the replica's work on it; harmless after the end."""
        ...


def turn_request(identity: ProgramIdentity, body: Mapping[str, Any]) -> TurnRequest:
    """What the router is asked for a turn."""
    key, parent = identity.key, identity.parent_id
    return TurnRequest(
        key=key if key is not None else f"{identity.tenant}//{uuid4().hex}",  # two slashes: no program's key
        tenant=identity.tenant,
        prompt_tokens=prompt_tokens(body),
        prefix=prefix_blocks(prompt_of(body), salt_of(body)),
        lone=key is None,
        last=identity.last_turn,
        parent_key=None if parent is None else f"{identity.tenant}/{parent}",
        hints=identity.hints,
        forecast=identity.forecast,
    )


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Of a request: exact where the prompt is token ids, else by its bytes."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return len(prompt)
    return sum(_text_bytes(body.get(field)) for field in ("prompt", "tools", "messages")) // BYTES_PER_TOKEN


class PlacedAnswers(Generic[Piece]):
    """The pieces of a turn's answer. Its place is given up at the end, by `over`, or by `cancel`.

    Until the first piece is there, a replica that the call did not reach or that knows of a move costs the client
    nothing: the turn is placed again.

    Args:
        places: where turns go.
        request: the turn.
        call: makes the call, once the turn has its place.
    """

    def __init__(self, places: Places, request: TurnRequest, call: Callable[[Placement], Calls[Piece]]) -> None:
        self._places = places
        self._request = request
        self._call = call
        self._placement: Placement | None = None
        self._answers: Calls[Piece] | None = None
        self._failed = False

    @property
    def elsewhere(self) -> TurnRequest:
        """The turn, to be placed on another replica than those where it has been."""
        if self._placement is None:
            return self._request
        return replace(self._request, avoid=self._request.avoid | {self._placement.session})

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        if self._answers is None:
            return await self._begin()
        return self._seen(await self._next(self._answers))

    def over(self, *, context_tokens: int | None = None) -> None:
        """Nothing more of it matters; the replica's own end of the call is left alone. Again is harmless."""
        if self._placement is not None:
            self._placement.end(context_tokens=context_tokens, complete=not self._failed)

    def cancel(self) -> None:
        """Stop the replica's work on it; harmless after the end."""
        if self._answers is not None:
            self._answers.cancel()
        if self._placement is not None:
            self._placement.end()

    async def _begin(self) -> Piece:
        for hop in range(MAX_HOPS + 1):
            self._placement = placement = await self._places.place(self._request)
            answers = self._answers = self._call(placement)
            try:
                piece = await self._next(answers)
            except ReplicaGone:
                if hop == MAX_HOPS:
                    raise
                self._request = self.elsewhere
            else:
                if not isinstance(piece, ProgramMoved) or hop == MAX_HOPS:
                    return self._seen(piece)
                await self._places.fenced(placement, piece.epoch)
            placement.end()
        raise AssertionError("the last hop returns or raises")

    async def _next(self, answers: Calls[Piece]) -> Piece:
        try:
            return await anext(answers)
        except StopAsyncIteration:
            self.over()
            raise

    def _seen(self, piece: Piece) -> Piece:
        if isinstance(piece, HttpError):
            self._failed = True
            self.over()
        return piece


class Attempts:
    """Asks a replica for a turn's answer, and after its death another: `cluster.stream_relay.Attempt`.

    Args:
        places: where turns go.
        request: makes known the turn, once what is expected of it is; asked before the first replica is.
        call: makes the call, given the place and how far another replica came with the answer.
        check: called before each, raises what refuses the turn.
    """

    def __init__(
        self,
        places: Places,
        request: Callable[[], Awaitable[TurnRequest]],
        call: Callable[[Placement, Progress | None], Calls[Any]],
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self._places = places
        self._ask = request
        self._call = call
        self._check = check
        self._last: PlacedAnswers[Any] | None = None

    async def __call__(self, so_far: Progress | None) -> PlacedAnswers[Any]:
        """Ask one that has not failed this turn."""
        if self._last is None:
            request, _ = await asyncio.gather(self._ask(), self._check())
        else:
            await self._check()
            request = self._last.elsewhere
        call = self._call  # not this object, which has the answers: it would be left to the garbage collector
        self._last = PlacedAnswers(self._places, request, lambda placement: call(placement, so_far))
        return self._last

    def over(self, *, context_tokens: int) -> None:
        """The turn has come to its proper end."""
        if self._last is not None:
            self._last.over(context_tokens=context_tokens)


def _text_bytes(value: object) -> int:
    """Of all text in a JSON value. Its depth is bounded where bodies are read."""
    match value:
        case str():
            return len(value.encode("utf-8", "surrogatepass"))
        case list():
            return sum(map(_text_bytes, value))
        case dict():
            return sum(map(_text_bytes, value.values()))
    return 0
