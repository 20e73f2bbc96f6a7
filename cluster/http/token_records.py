"""The routes of recorded tokens: `/v1/programs/{program_id}/tokens`, and the list of recorded programs."""

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from cluster.api.openai import RETRY_AFTER_S
from cluster.core.errors import BadRequest, Overloaded
from cluster.core.turn import unpack_ids
from cluster.core.turn_tokens import AnswerTokens, unpack_logprobs
from cluster.store.client import StoreUnavailable
from cluster.store.token_records import Deletion, RecordedPage, RecordedTurn, TokenRecordStore

MOST_LISTED = 1000
MOST_TURNS = 100
"""Maximum number of programs, and of turns of a program, in a page."""


class TokenRecordRoutes:
    """The handlers of the routes.

    Args:
        store: has the records.
    """

    def __init__(self, store: TokenRecordStore) -> None:
        self._store = store

    async def list(self, tenant: str, limit: int, after: str | None) -> Response:
        """List the tenant's programs with recorded turns, each with the bytes of its record.

        Raises:
            BadRequest: ``limit`` is not between 1 and `MOST_LISTED`.
            Overloaded: the store does not answer.
        """
        _check(limit, MOST_LISTED)
        try:
            found = await self._store.list(tenant, limit + 1, after or "")
        except StoreUnavailable as error:
            raise _unavailable() from error
        page = [{"id": name, "object": "program.record", "bytes": size} for name, size in found[:limit]]
        last = page[-1]["id"] if page else None
        return JSONResponse({"object": "list", "data": page, "has_more": len(found) > limit, "last_id": last})

    async def show(self, tenant: str, program_id: str, limit: int, after: int) -> Response:
        """Return the recorded turns of a program.

        Args:
            tenant: the tenant's name.
            program_id: the program's id.
            limit: largest number of turns.
            after: number of the last turn of the page before; 0: the first page.

        Raises:
            BadRequest: ``limit`` is not between 1 and `MOST_TURNS`, or nothing of the program is recorded (404).
            Overloaded: the store does not answer.
        """
        _check(limit, MOST_TURNS)
        try:
            page = await self._store.page(tenant, program_id, max(0, after), limit)
        except StoreUnavailable as error:
            raise _unavailable() from error
        if page is None:
            raise _unknown(program_id)
        body = await asyncio.to_thread(_encoded, program_id, page)
        return Response(body, media_type="application/json")

    async def delete(self, tenant: str, program_id: str, last_turn: int) -> Response:
        """Delete the record of a program.

        ``last_turn``: number of its last turn; 0: it is not checked.

        Raises:
            BadRequest: nothing of the program is recorded (404), or a later turn has begun (409).
            Overloaded: the store does not answer.
        """
        try:
            deleted = await self._store.delete(tenant, program_id, max(0, last_turn))
        except StoreUnavailable as error:
            raise _unavailable() from error
        if deleted is Deletion.UNKNOWN:
            raise _unknown(program_id)
        if deleted is Deletion.NEWER:
            message = f"the program {program_id!r} has a turn after turn {last_turn}"
            raise BadRequest(message, status=HTTPStatus.CONFLICT, param="last_turn")
        return JSONResponse({"id": program_id, "object": "program.record.deleted", "deleted": True})


def _encoded(program_id: str, page: RecordedPage) -> bytes:
    """Return a page as JSON. The ids of one turn at a time are objects of Python."""
    turns = [msgspec.Raw(msgspec.json.encode(public_turn(program_id, turn))) for turn in page.turns]
    last = page.turns[-1].number if page.turns else None
    return msgspec.json.encode({"object": "list", "data": turns, "has_more": page.more, "last_turn": last})


def public_turn(program_id: str, turn: RecordedTurn) -> dict[str, Any]:
    """Return a recorded turn as JSON values."""
    head, tokens = turn.head, turn.tokens
    return {
        "object": "program.turn",
        "program": program_id,
        "parent": head.parent,
        "turn": turn.number,
        "request": head.request,
        "method": head.method,
        "model": head.model,
        "began_at": head.began_s,
        "ended_at": turn.ended_s,
        "status": "incomplete" if tokens is None else "completed",
        "prompt_token_ids": None if tokens is None else unpack_ids(tokens.prompt),
        "answers": [] if tokens is None else [_public_answer(answer) for answer in tokens.answers],
    }


def _public_answer(answer: AnswerTokens) -> dict[str, Any]:
    return {
        "index": answer.index,
        "token_ids": unpack_ids(answer.token_ids),
        "logprobs": unpack_logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "weights": [{"version": span.version, "from": span.start} for span in answer.weights],
    }


def _check(limit: int, most: int) -> None:
    if not 1 <= limit <= most:
        raise BadRequest(f"limit must be between 1 and {most}, not {limit}", param="limit")


def _unknown(program_id: str) -> BadRequest:
    return BadRequest(f"nothing of the program {program_id!r} is recorded", status=404, param="program_id")


def _unavailable() -> Overloaded:
    return Overloaded("the records are out of reach", code="store_unavailable", retry_after_s=RETRY_AFTER_S)
