"""The logs of runs, in Redis: what any ingress needs to go on with a program whose ingress died.

A run's log is a sequence of opaque items, numbered from 0. An item that was acknowledged stays at its number, and its
number never gets another content. A run is worked on by one owner at a time, through a lease: others may claim it when
the lease has ended, and from then on the former owner's writes are refused. Redis's clock decides, nobody else's.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import quote, unquote_to_bytes

import msgspec

from cluster.clock import Clock, MonotonicClock
from cluster.errors import RunLeaseLost, RunLogGap, RunOpen, RunStoreUnavailable, RunUnknown
from cluster.patience import answered_within
from cluster.run_followers import News, RunFollowers
from cluster.run_log import AlreadyThere, Created, NewRun, Renewal, RunHead, RunLog
from cluster.run_scripts import (
    APPEND,
    CANCEL,
    CLAIM,
    CREATE,
    DELETE,
    END,
    LIST,
    MAX_LISTED,
    MAX_PAGE_BYTES,
    MAX_PAGE_ITEMS,
    READ,
    RELEASE,
    RENEW,
    SECRET,
    SPACE,
)
from cluster.store import CALL_ERRORS, StoreFailure, StoreHealth, connect

MAX_CONNECTIONS = 16
"""For calls; more wait for one. Followers share another."""
FOLLOW_S = 0.5
"""How long the followers' read waits at the server, so that one which Redis has lost is noticed."""
FOLLOW_ITEMS = 16
"""Most items of one log in the answer to it."""
BELL_S = 60
"""A process that is gone leaves its bell for so long."""

_Head = tuple[bytes, bytes, bytes, bytes, bytes, bytes | None, bytes | None]
_Answer = TypeVar("_Answer")


class RunStore:
    """One owner's way to the runs.

    Every call ends within about ``timeout_s``, a follower's wait apart. What goes wrong there is a
    `RunStoreUnavailable`; whether a write was done is then unknown, and it can be repeated.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        owner: this process's name, unique and never used again.
        timeout_s: bounds every call.
        lease_s: a run that was not renewed for so long can be claimed.
        retention_s: what is left of a closed run is forgotten after this time.
        clock: tells how long the store was gone.

    Raises:
        ConfigError: the URL cannot be used.
        ValueError: the owner has no name.
    """

    def __init__(
        self,
        url: str,
        *,
        owner: str,
        timeout_s: float,
        lease_s: float,
        retention_s: float,
        clock: Clock | None = None,
    ) -> None:
        if not owner:
            raise ValueError("an owner needs a name")
        back = "the log of programs"
        self._health = StoreHealth(f"{back} is out of reach", back, clock or MonotonicClock())
        self.failures = self._health.failures
        """Calls that failed, and damaged runs that a list left out (CORRUPT), since the start."""
        self._owner = owner
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._lease_us = max(1, int(lease_s * 1e6))
        self._retention_ms = max(1, int(retention_s * 1e3))
        self._redis = connect(url, connections=MAX_CONNECTIONS)
        self._following = connect(url, connections=1)
        self._followers = RunFollowers(self._news, self._ring_bell)
        self._bell, self._bell_seen = f"{SPACE}bell:{_quoted(owner)}", b"0-0"

    @property
    def healthy(self) -> bool:
        """Whether the last call went through."""
        return self._health.healthy

    # --- what an owner writes -----------------------------------------------------------------------------------------

    async def create(self, run: NewRun, items: Sequence[bytes]) -> Created | AlreadyThere:
        """Open ``run`` with the first items of its log, leased to this owner.

        Again, by the same owner with the same items, is harmless: after an unknown outcome, or to write the whole log
        again to a Redis that has lost it. Then leave the idempotency key out if it may be another run's by now.

        Raises:
            RunLeaseLost: the run is there and another's, closed, or has other items.
            RunStoreUnavailable: the outcome is unknown.
            ValueError: there are no items.
        """
        if not items:
            raise ValueError("a log begins with an item")
        tenant, again = _quoted(run.tenant), run.idempotency
        arguments: list[Any] = [_quoted(run.id), self._owner, self._lease_us, run.status, tenant, _quoted(run.program)]
        arguments += [msgspec.json.encode(dict(run.labels)), int(run.secret is not None), run.secret or b""]
        arguments += [f"{tenant}/{_quoted(again.key)}", again.fingerprint] if again else ["", b""]
        answer = await self._call(CREATE, [*arguments, *items], list[bytes | int])
        match answer:
            case [b"ok"]:
                return Created(run.id)
            case [b"known", bytes() as other, same]:
                return AlreadyThere(_plain(other), same_body=bool(same))
            case [b"lost"]:
                raise _lost(run.id)
        raise self._strange(answer)

    async def append(
        self, run_id: str, start: int, items: Sequence[bytes], *, status: str | None = None, final: bool = False
    ) -> None:
        """Append ``items``, numbered from ``start``; those that are there already are skipped.

        Args:
            run_id: a run that this owner holds.
            start: number of the first item.
            items: any number of them.
            status: told from now on.
            final: closes the run: its secret is forgotten at once, the rest of it after the retention time.

        Raises:
            RunLeaseLost: the run is another's, or closed, or the items there are others.
            RunUnknown: Redis has lost it: create it again, with all items.
            RunLogGap: Redis has lost items before ``start``: append from ``expected`` on.
            RunStoreUnavailable: the outcome is unknown.
        """
        if start < 0:
            raise ValueError(f"items are numbered from 0, not {start}")
        arguments: list[Any] = [_quoted(run_id), self._owner, start, status or "", int(final), self._retention_ms]
        answer = await self._call(APPEND, [*arguments, *items], list[bytes | int])
        match answer:
            case [b"ok"]:
                return
            case [b"lost"]:
                raise _lost(run_id)
            case [b"unknown"]:
                raise RunUnknown(f"run {run_id} is not in the store")
            case [b"gap", int() as expected]:
                raise RunLogGap(f"run {run_id}: item {start} after {expected} items", expected)
            case _:
                raise self._strange(answer)

    async def renew(self, run_ids: Collection[str]) -> Renewal:
        """Renew the leases of all runs that this process works on, in one round trip.

        A lease that has ended is renewed, too, if nobody has claimed the run.
        """
        if not run_ids:
            return Renewal(frozenset(), frozenset(), frozenset())
        arguments = [self._owner, self._lease_us, *map(_quoted, run_ids)]
        answer = await self._call(RENEW, arguments, tuple[list[bytes], list[bytes], list[bytes]])
        return Renewal(*(frozenset(map(_plain, ids)) for ids in answer))

    async def claim(self, limit: int, working: Collection[str] = ()) -> list[str]:
        """Take over up to ``limit`` open runs whose lease has ended, the longest ended first.

        Args:
            limit: how many.
            working: runs that this process works on, and so leaves alone: their lease may have ended unnoticed, and
                may have been another's meanwhile. Other runs of its own it claims like anybody's: those released, and
                those whose creation was given up, its outcome unknown.
        """
        arguments = [self._owner, self._lease_us, max(0, limit), *map(_quoted, working)]
        return [_plain(run_id) for run_id in await self._call(CLAIM, arguments, list[bytes])]

    async def release(self, run_ids: Collection[str]) -> None:
        """Stop working on these runs: anybody may claim them at once. Those of others are left alone."""
        if run_ids:
            await self._call(RELEASE, [self._owner, *map(_quoted, run_ids)], int)

    # --- what anybody asks --------------------------------------------------------------------------------------------

    async def read(self, run_id: str, start: int = 0, limit: int | None = None) -> RunLog | None:
        """A page of the log from item ``start`` on; None: there is no such run.

        A page ends after `MAX_PAGE_ITEMS`, `MAX_PAGE_BYTES` (at least one item) or ``limit``: see `RunLog.more`.
        """
        most = MAX_PAGE_ITEMS if limit is None else min(max(0, limit), MAX_PAGE_ITEMS)
        start = max(0, start)
        arguments = [_quoted(run_id), start, most, MAX_PAGE_BYTES]
        answer = await self._call(READ, arguments, list[tuple[_Head, int, tuple[bytes, ...]]])
        if not answer:
            return None
        fields, length, items = answer[0]
        try:
            return RunLog(_head(run_id, fields), start, items, length)
        except msgspec.ValidationError as error:
            raise self._unavailable(error) from error

    async def follow(self, run_id: str, start: int = 0) -> AsyncIterator[list[bytes]]:
        """The items from ``start`` on, in batches as they come, until the log is closed.

        It waits for as long as nobody works on the run, and while Redis does not answer: the caller has the deadline.

        Raises:
            RunUnknown: there is no such run, or Redis has lost it and nobody created it again for a lease's time.
            RunStoreUnavailable: Redis did not answer at the beginning.
        """
        log = await self.read(run_id, start)
        if log is None:
            raise RunUnknown(f"run {run_id} is not in the store")
        position, unknown = max(0, start), False
        while True:
            if log is not None:
                if log.items:
                    position = log.end
                    yield list(log.items)
                if log.closed and not log.more:
                    return
            if log is None or not log.more:
                with self._followers.tail(run_id, position) as tail:
                    while (news := await self._followers.take(tail, self._lease_s)) is not None:
                        if news.items:
                            yield list(news.items)
                        if news.ended:
                            return
                    position = tail.position
            try:
                log = await self.read(run_id, position)
            except RunStoreUnavailable:
                log, unknown = None, False
                continue
            if log is None and unknown:
                raise RunUnknown(f"the store has lost run {run_id}")
            unknown = log is None

    async def ask_cancel(self, run_id: str) -> bool:
        """Tell the owner, at its next renewal, to cancel the run. False: it is unknown or closed."""
        return bool(await self._call(CANCEL, [_quoted(run_id)], int))

    async def secret(self, run_id: str) -> bytes | None:
        """What was told in confidence; None: nothing was, or the run is closed or unknown."""
        answer = await self._call(SECRET, [_quoted(run_id)], list[bytes | None])
        return answer[0] if answer else None

    async def runs(
        self, tenant: str, *, program: str | None = None, limit: int = 100, before: float | None = None
    ) -> list[RunHead]:
        """A tenant's runs, or those of one program, the newest first; at most `MAX_LISTED`.

        Args:
            tenant: whose runs.
            program: only of this program.
            limit: how many.
            before: the ``created_s`` of the last run of the page before.
        """
        name = f"tenant:{_quoted(tenant)}" if program is None else f"program:{_quoted(tenant)}/{_quoted(program)}"
        most = min(limit, MAX_LISTED)
        if most <= 0:
            return []
        arguments = [most, "+inf" if before is None else f"({round(before * 1e6)}"]
        answer = await self._call(LIST, arguments, list[tuple[bytes, _Head]], key=SPACE + name)
        heads = []
        for run_id, fields in answer:
            try:
                heads.append(_head(_plain(run_id), fields))
            except msgspec.ValidationError:
                self.failures[StoreFailure.CORRUPT] += 1
        return heads

    async def delete(self, run_id: str) -> bool:
        """Forget a closed run: its log, its place in lists, its idempotency key. False: it is unknown.

        Raises:
            RunOpen: it is not closed.
        """
        answer = await self._call(DELETE, [_quoted(run_id)], bytes)
        if answer == b"open":
            raise RunOpen(f"run {run_id} is open")
        return answer == b"ok"

    async def close(self) -> None:
        """Close the connections. Runs that are held stay so until their leases end: see :meth:`release`."""
        await self._followers.close()
        await self._following.aclose()
        await self._redis.aclose()

    # --- Redis --------------------------------------------------------------------------------------------------------

    async def _call(
        self, script: str, arguments: Sequence[Any], kind: type[_Answer], *, key: str = SPACE + "open"
    ) -> _Answer:
        try:
            async with answered_within(self._timeout_s):
                answer = await cast(Any, self._redis.register_script(script))([key], arguments)
            converted = msgspec.convert(answer, kind)
        except CALL_ERRORS as error:
            raise self._unavailable(error) from error
        self._health.recover()
        return converted

    async def _news(self, wanted: Mapping[str, int]) -> Mapping[str, News]:
        logs = {f"{SPACE}log:{_quoted(run_id)}".encode(): run_id for run_id in wanted}
        places: dict[Any, Any] = {key: f"0-{wanted[run_id]}" for key, run_id in logs.items()}
        try:
            async with answered_within(FOLLOW_S + self._timeout_s):
                answer = await self._following.xread(
                    places | {self._bell: self._bell_seen}, count=FOLLOW_ITEMS, block=int(FOLLOW_S * 1000)
                )
            found = msgspec.convert(answer, list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]])
        except CALL_ERRORS as error:
            raise self._unavailable(error) from error
        news = {}
        for key, entries in found:
            run_id = logs.get(key)
            if run_id is None:
                self._bell_seen = entries[-1][0]
                continue
            items = [fields.get(b"i", b"") for place, fields in entries if place != END]
            news[run_id] = News(wanted[run_id], items, ended=entries[-1][0] == END)
        return news

    async def _ring_bell(self) -> None:
        try:
            async with answered_within(self._timeout_s), self._redis.pipeline() as pipeline:
                pipeline.xadd(self._bell, {"": ""}, maxlen=1, approximate=False)
                pipeline.expire(self._bell, BELL_S)
                await pipeline.execute()
        except CALL_ERRORS as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> RunStoreUnavailable:
        reason = self._health.fail(error)
        return RunStoreUnavailable(f"the log of programs cannot be used now ({reason})", reason)

    def _strange(self, answer: object) -> RunStoreUnavailable:
        return self._unavailable(msgspec.ValidationError(f"no answer of ours: {answer!r:.100}"))


def _lost(run_id: str) -> RunLeaseLost:
    return RunLeaseLost(f"run {run_id} is another's by now, or closed")


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def _plain(quoted: bytes) -> str:
    return unquote_to_bytes(quoted).decode(errors="surrogatepass")


def _head(run_id: str, fields: _Head) -> RunHead:
    """Raises ValidationError: they are not what was written."""
    tenant, program, created_us, status, labels, closed, cancel = fields
    try:
        return RunHead(
            run_id,
            _plain(tenant),
            _plain(program),
            created_s=int(created_us) / 1e6,
            status=status.decode(),
            labels=msgspec.json.decode(labels, type=dict[str, str]),
            open=closed is None,
            cancel_asked=cancel is not None,
        )
    except (ValueError, msgspec.MsgspecError) as error:
        raise msgspec.ValidationError(f"run {run_id} is damaged: {error}") from error
