"""Records the exact tokens of turns that ask for it (`x-record: tokens`), as their clients get them.

The record of a turn begins in the store before the turn is sent to a replica. Without it, the turn is rejected. It
is completed before the client gets the last piece, so that whoever has an answer can read its tokens. If the store does
not answer then, the tokens are kept and written later. A turn that could not be completed stays in the record, without
tokens.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from time import time
from typing import Any, NoReturn, Protocol, Self
from uuid import uuid4

from cluster.api.openai import REQUEST_ID, RETRY_AFTER_S, contains_error
from cluster.core.clock import Clock
from cluster.core.errors import STORE_FULL, BadRequest, HttpError, Overloaded
from cluster.core.program import ProgramIdentity
from cluster.core.supervision import SupervisedTasks
from cluster.core.turn_tokens import TurnTokens
from cluster.dispatch.failover import ends_answer
from cluster.store.client import StoreUnavailable
from cluster.store.token_records import FullMemory, TokenRecordStore, TurnHead

logger = logging.getLogger("ray.serve")

HEADER = "x-record"

FULL: Mapping[FullMemory, str] = {
    FullMemory.PROGRAM: "the record of this program is full (records.program_bytes); export and delete it",
    FullMemory.TENANT: "the tenant's records are full (records.tenant_bytes); export and delete some",
    FullMemory.ALL: "the memory for records is full (records.total_bytes); export and delete some",
}

BEGIN_ATTEMPTS = 3
"""Number of attempts to begin a record. Each ends after ``redis.timeout_s``."""

MAX_LATE = 256
"""Maximum number of turns whose tokens wait for the store in one ingress."""
SWEEP_S = 60.0
"""Seconds between two deletions of records that have expired."""
MAX_SWEEPS = 32
"""Largest number of calls for such a deletion, each of which deletes some."""
LATE_ATTEMPTS = 60
LATE_WAIT_S = 1.0
"""Number of attempts to write such a turn, and the seconds between them."""


class RecordOutcome(StrEnum):
    """What became of a turn that was to be recorded."""

    STORED = "stored"
    REJECTED = "rejected"
    """It was not begun, since a bound is reached or the store did not answer."""
    DROPPED = "dropped"
    """It failed or its client left, so that it has no whole answer."""
    LOST = "lost"
    """It was answered, and its tokens could not be stored. The record has it without tokens."""


class TokenAnswers(Protocol):
    """The pieces of an answer, with the tokens of the turn at its end."""

    @property
    def record(self) -> TurnTokens | None:
        """The tokens of the whole turn, at its end."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes | HttpError: ...

    @property
    def output_tokens(self) -> int:
        """Number of tokens that have come."""
        ...

    @property
    def alone_s(self) -> float | None:
        """See `cluster.core.slo.TurnRecord.alone_s`."""
        ...

    def cancel(self) -> None:
        """Stop the work on the answer. After its end, it has no effect."""
        ...


class Recording:
    """The record of one turn that has begun.

    Args:
        recordings: stores it.
        identity: the identity of its program.
        number: its number in the record.
        key: the key with which it began.
    """

    def __init__(self, recordings: "Recordings", identity: ProgramIdentity, number: int, key: bytes) -> None:
        self._recordings = recordings
        self._name = (identity.tenant, str(identity.program_id))
        self._number, self._key = number, key
        self._over = False

    async def finish(self, tokens: TurnTokens | None) -> None:
        """Store the tokens of the turn, whose answer is complete. None: the replica has not reported them."""
        if not self._over:
            self._over = True
            await self._recordings.finish(*self._name, self._number, tokens)

    def drop(self) -> None:
        """Remove the turn, which has no whole answer. After its end this does nothing."""
        if not self._over:
            self._over = True
            self._recordings.drop(*self._name, self._number, self._key)


class Recordings:
    """The records of one ingress.

    Args:
        store: the store.
        clock: supervises the writes.
    """

    def __init__(self, store: TokenRecordStore, clock: Clock) -> None:
        self.store = store
        self.counters: Counter[RecordOutcome] = Counter(dict.fromkeys(RecordOutcome, 0))
        self._tasks = SupervisedTasks("recorded tokens", clock)
        self._late = 0
        self._removals: dict[Callable[[], Awaitable[None]], str] = {}
        """The removals of turns that the store has not confirmed, each with its program."""

    def open(self) -> None:
        """Begin to delete records that have expired, also while no turn is recorded."""
        self._tasks.start("expired records", self._sweep_for_ever)

    async def begin(self, method: str, body: Mapping[str, Any], identity: ProgramIdentity, request: str) -> Recording:
        """Begin the record of a turn.

        Raises:
            BadRequest: the turn belongs to no program, or has several prompts.
            Overloaded: a bound is reached, or the store does not answer.
        """
        check_recordable(body, identity)
        head = TurnHead(request, method, str(body.get("model")), identity.parent_id, time())
        where, key = (identity.tenant, str(identity.program_id)), uuid4().bytes
        undo = partial(self._undo, *where, head, key)
        try:
            begun = await self._begun(*where, head, key)
        except asyncio.CancelledError:
            self.counters[RecordOutcome.DROPPED] += 1
            self._remove("dropped record", where[1], undo, LATE_WAIT_S)
            raise
        except StoreUnavailable as error:
            self.counters[RecordOutcome.REJECTED] += 1
            self._remove("rejected record", where[1], undo, LATE_WAIT_S)
            message = "the turn cannot be recorded, since the store does not answer"
            raise Overloaded(message, code="store_unavailable", retry_after_s=RETRY_AFTER_S) from error
        if isinstance(begun, FullMemory):
            self.counters[RecordOutcome.REJECTED] += 1
            raise Overloaded(FULL[begun], code=STORE_FULL, retry_after_s=RETRY_AFTER_S)
        return Recording(self, identity, begun, key)

    async def finish(self, tenant: str, program: str, number: int, tokens: TurnTokens | None) -> None:
        """Store the tokens of a turn, now or, if the store does not answer, later."""
        ended_s = time()
        if tokens is None:
            self._lost(program, number, "the replica has not reported them")
            return
        try:
            await self._write(tenant, program, number, ended_s, tokens)
        except StoreUnavailable:
            if self._late >= MAX_LATE:
                self._lost(program, number, f"{MAX_LATE} turns wait for the store")
                return
            self._late += 1
            self._tasks.run("late record", self._write_late(tenant, program, number, ended_s, tokens))

    def drop(self, tenant: str, program: str, number: int, key: bytes) -> None:
        """Remove the turn that began with this key, in the background."""
        self.counters[RecordOutcome.DROPPED] += 1
        self._remove("dropped record", program, partial(self.store.drop, tenant, program, number, key), 0.0)

    async def aclose(self) -> None:
        """Write and remove what waits for the store once more, and close. Every call has the store's timeout."""
        await self._tasks.aclose()
        await asyncio.gather(*map(self._last_removal, tuple(self._removals)))
        await self.store.close()

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._tasks.failed

    async def _write(self, tenant: str, program: str, number: int, ended_s: float, tokens: TurnTokens) -> None:
        if await self.store.finish(tenant, program, number, ended_s, tokens):
            self.counters[RecordOutcome.STORED] += 1
        else:
            self._lost(program, number, "the record was deleted, or has expired")

    async def _sweep_for_ever(self) -> NoReturn:
        while True:
            left: int | None = None
            with suppress(StoreUnavailable):
                for _ in range(MAX_SWEEPS):
                    before = left
                    left = await self.store.sweep()
                    if left == before:
                        break
            await asyncio.sleep(SWEEP_S)

    async def _write_late(self, tenant: str, program: str, number: int, ended_s: float, tokens: TurnTokens) -> None:
        turn = (tenant, program, number, ended_s, tokens)
        try:
            for _ in range(LATE_ATTEMPTS):
                await asyncio.sleep(LATE_WAIT_S)
                try:
                    await self._write(*turn)
                except StoreUnavailable:
                    continue
                return
            self._lost(program, number, "the store does not answer")
        except asyncio.CancelledError:  # this process ends
            try:
                await self._write(*turn)
            except StoreUnavailable:
                self._lost(program, number, "the ingress ends, and the store does not answer")
            raise
        finally:
            self._late -= 1

    async def _begun(self, tenant: str, program: str, head: TurnHead, key: bytes) -> int | FullMemory:
        for _ in range(BEGIN_ATTEMPTS - 1):
            with suppress(StoreUnavailable):
                return await self.store.begin(tenant, program, head, key)
        return await self.store.begin(tenant, program, head, key)

    async def _undo(self, tenant: str, program: str, head: TurnHead, key: bytes) -> None:
        """Remove a rejected or cancelled turn, which may have begun in the store although no answer came."""
        if isinstance(begun := await self.store.begin(tenant, program, head, key), int):
            await self.store.drop(tenant, program, begun, key)

    def _remove(self, task: str, program: str, remove: Callable[[], Awaitable[None]], wait_s: float) -> None:
        """Remove a turn in the background. What is left of it when this process ends is done by `aclose`.

        Args:
            task: the name of the background task.
            program: the program of the turn.
            remove: removes the turn. A repeated call does nothing more.
            wait_s: seconds before the first attempt.
        """
        self._removals[remove] = program
        self._tasks.run(task, self._remove_late(remove, wait_s))

    async def _remove_late(self, remove: Callable[[], Awaitable[None]], wait_s: float) -> None:
        for _ in range(LATE_ATTEMPTS):
            await asyncio.sleep(wait_s)
            if await self._try_removal(remove):
                return
            wait_s = LATE_WAIT_S
        self._give_up(remove)

    async def _last_removal(self, remove: Callable[[], Awaitable[None]]) -> None:
        if not await self._try_removal(remove):
            self._give_up(remove)

    async def _try_removal(self, remove: Callable[[], Awaitable[None]]) -> bool:
        """Return whether the store has confirmed the removal."""
        with suppress(StoreUnavailable):
            await remove()
            del self._removals[remove]
            return True
        return False

    def _give_up(self, remove: Callable[[], Awaitable[None]]) -> None:
        program = self._removals.pop(remove)
        logger.warning("a turn of %r that has failed may stay in its record, without tokens", program)

    def _lost(self, program: str, number: int, reason: str) -> None:
        self.counters[RecordOutcome.LOST] += 1
        logger.error("the tokens of turn %d of %r are not recorded: %s", number, program, reason)


def check_recordable(body: Mapping[str, Any], identity: ProgramIdentity) -> None:
    """Check that the tokens of a turn can be recorded.

    Raises:
        BadRequest: the turn belongs to no program, or has several prompts or a beam search.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    reasons = {
        "the request names no program; its id is the header x-session-id": identity.program_id is None,
        "a request with several prompts has no turn of a program": several,
        "a beam search has no tokens in order": bool(body.get("use_beam_search")),
    }
    for reason, applies in reasons.items():
        if applies:
            raise BadRequest(f"{HEADER}: {reason}", param=HEADER)


class RecordedAnswers:
    """Passes a turn's answer on, and records its tokens.

    Args:
        answers: the answer.
        recordings: begins the record, with the first piece that is awaited.
        method: the method of the turn.
        body: its body.
        headers: the headers that its replica gets.
        identity: the identity of its program.
    """

    def __init__(
        self,
        answers: TokenAnswers,
        recordings: Recordings,
        method: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        identity: ProgramIdentity,
    ) -> None:
        self._answers = answers
        self._recordings = recordings
        self._turn = (method, body, identity, headers.get(REQUEST_ID, ""))
        self._recording: Recording | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        if self._recording is None:
            self._recording = await self._recordings.begin(*self._turn)
        try:
            piece = await anext(self._answers)
        except BaseException:
            self._recording.drop()
            raise
        if isinstance(piece, HttpError) or (ends_answer(piece) and contains_error(piece)):
            self._recording.drop()
        elif ends_answer(piece):
            await self._recording.finish(self._answers.record)
        return piece

    @property
    def output_tokens(self) -> int:
        """Number of tokens that have come."""
        return self._answers.output_tokens

    @property
    def alone_s(self) -> float | None:
        """See `cluster.core.slo.TurnRecord.alone_s`."""
        return self._answers.alone_s

    def cancel(self) -> None:
        """Stop the answer. It is complete, or nobody wants it any more."""
        self._answers.cancel()
        if self._recording is not None:
            self._recording.drop()
