"""The logs of runs in Redis. With a run's log, any ingress can continue the run after its ingress has died.

A log is a sequence of opaque items, numbered from 0. An acknowledged item keeps its number and its content. One owner
at a time works on a run, through a lease. When the lease has ended, another owner may claim the run, and from then on
the former owner's writes are rejected. Only Redis's clock decides whether a lease has ended.
"""

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import RunLeaseLost, RunLogGap, RunOpen, RunStoreUnavailable, RunUnknown
from cluster.store.client import (
    RedisStore,
    StoreFailure,
    StoreMemory,
    StoreUnavailable,
    connect,
    lua,
    milliseconds,
    quoted,
)
from cluster.store.runs.followers import LogUpdate, RunFollowers
from cluster.store.runs.records import AlreadyThere, Created, Idempotency, LogKind, NewRun, Renewal, RunHead, RunLog

END = b"1-1"
"""Id of the stream entry that ends a closed log. It is greater than the id of any item."""
MAX_LISTED = 1000
"""Maximum number of runs in a page of a list."""
MAX_PAGE_ITEMS = 1024
MAX_PAGE_BYTES = 8 << 20
"""Maximum size of a page of a log (bytes). A single larger item is a page of its own."""
MAX_CONNECTIONS = 16
"""Maximum number of connections for calls. Further calls wait for one. Followers share another connection."""
FOLLOW_S = 0.5
"""Seconds that the followers' read waits at the server. It is bounded, so that a read that Redis has lost is
noticed."""
FOLLOW_ITEMS = 16
"""Maximum number of items of one log in the answer to the followers' read."""
WAKE_KEY_S = 60
"""Seconds after its last use, after which the key that interrupts a process's read expires."""

PROLONGED_AT_ONCE = 256
"""Number of runs that one script prolongs. Redis does nothing else meanwhile."""

_SCRIPT = lua("cluster.store.runs", "runs.lua")

_Head = tuple[bytes, bytes, bytes, bytes, bytes, bytes | None, bytes | None]
_Answer = TypeVar("_Answer")


class RunStore(RedisStore):
    """One owner's access to the runs.

    Every call except `follow` ends within about ``timeout_s``. A failed call raises `RunStoreUnavailable`. It is then
    unknown whether a write was done, and the call can be repeated.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        owner: this process's name, which must be unique and never be used again.
        timeout_s: timeout of each call in seconds.
        lease_s: seconds without a renewal after which a run can be claimed.
        retention_s: seconds after which the log of a closed run is deleted.
        clock: measures how long the store was unavailable.
        kind: what is logged. A store reads and claims logs of its own kind only.

    Raises:
        ConfigError: the URL is invalid.
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
        kind: LogKind = LogKind.RUNS,
    ) -> None:
        if not owner:
            raise ValueError("an owner needs a name")
        super().__init__(
            url,
            name=f"the log of {kind.named}",
            degraded=f"the log of {kind.named} is out of reach",
            timeout_s=timeout_s,
            clock=clock or MonotonicClock(),
            connections=MAX_CONNECTIONS,
        )
        self._kind = kind
        # The braces put all logs of a kind on one node of a Redis cluster.
        self._space = f"caesura:v1:{{{kind.value}}}:"
        self._owner = owner
        self._lease_s = lease_s
        self._lease_us = max(1, int(lease_s * 1e6))
        self._retention_ms = milliseconds(retention_s)
        self._following = connect(url, connections=1)
        self._followers = RunFollowers(self._news, self._interrupt_read)
        self._wake_key, self._wake_seen = f"{self._space}wake:{quoted(owner)}", b"0-0"

    # --- writes of an owner -------------------------------------------------------------------------------------------

    async def create(self, run: NewRun, items: Sequence[bytes]) -> Created | AlreadyThere:
        """Open ``run`` with the first items of its log, and lease it to this owner.

        The same owner may repeat the call with the same items: after an unknown outcome, or to write the complete log
        again to a Redis that has lost it. In the second case, the idempotency key has to be left out if it may belong
        to another run by now.

        Raises:
            RunLeaseLost: the run exists, and has another owner, is closed, or has other items; or it was deleted or
                renounced in the last ten minutes.
            RunStoreUnavailable: the outcome is unknown.
            ValueError: there are no items.
        """
        if not items:
            raise ValueError("a log begins with an item")
        tenant, again = quoted(run.tenant), run.idempotency
        arguments: list[Any] = [quoted(run.id), self._owner, self._lease_us, run.status, tenant, quoted(run.program)]
        arguments += [msgspec.json.encode(dict(run.labels)), int(run.secret is not None), run.secret or b""]
        arguments += [f"{tenant}/{quoted(again.key)}", again.fingerprint] if again else ["", b""]
        answer = await self._call("create", [*arguments, *items], list[bytes | int])
        match answer:
            case [b"ok"]:
                return Created(run.id)
            case [b"known", bytes() as other, same]:
                return AlreadyThere(_plain(other), same_body=bool(same))
            case [b"lost"]:
                raise _lost(run.id)
        raise self._strange(answer)

    async def append(
        self,
        run_id: str,
        start: int,
        items: Sequence[bytes],
        *,
        status: str | None = None,
        final: bool = False,
        compact: bool = False,
        retention_s: float | None = None,
    ) -> None:
        """Append ``items``, numbered from ``start``. Items that the log already has are skipped.

        Args:
            run_id: a run that this owner holds.
            start: number of the first item.
            items: any number of items.
            status: the run's new status; None: it does not change.
            final: whether to close the run. Its secret is then deleted at once, and its log after the retention time.
            compact: whether only the first and the last item are left of a run that is closed.
            retention_s: seconds for which a run that is closed is kept; None: those of the store.

        Raises:
            RunLeaseLost: the run has another owner, is closed, or has other items at these numbers; or it was deleted
                or renounced in the last ten minutes.
            RunUnknown: Redis has lost the run. The caller has to create it again, with all items.
            RunLogGap: Redis has lost items before ``start``. The caller has to append from ``expected`` on.
            RunStoreUnavailable: the outcome is unknown.
            ValueError: ``start`` is negative.
        """
        if start < 0:
            raise ValueError(f"items are numbered from 0, not {start}")
        retention_ms = self._retention_ms if retention_s is None else milliseconds(retention_s)
        ending = ("compact" if compact else "1") if final else "0"
        arguments: list[Any] = [quoted(run_id), self._owner, start, status or "", ending, retention_ms]
        answer = await self._call("append", [*arguments, *items], list[bytes | int])
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
        """Renew the leases of runs that this process works on, in one round trip.

        A lease that has ended is renewed too, unless another owner has claimed the run.

        Raises:
            RunStoreUnavailable: the outcome is unknown.
        """
        if not run_ids:
            return Renewal(frozenset(), frozenset(), frozenset())
        arguments = [self._owner, self._lease_us, *map(quoted, run_ids)]
        answer = await self._call("renew", arguments, tuple[list[bytes], list[bytes], list[bytes]])
        return Renewal(*(frozenset(map(_plain, ids)) for ids in answer))

    async def claim(self, limit: int, working: Collection[str] = ()) -> list[str]:
        """Claim open runs whose lease has ended, and return their ids. The lease that ended first is claimed first.

        Args:
            limit: maximum number of runs.
            working: runs that this process works on. They are not claimed, since their lease may have ended unnoticed
                and may have had another owner in between. Other runs of this owner are claimed like those of any other:
                released runs, and runs whose creation had an unknown outcome and was not repeated.

        Raises:
            RunStoreUnavailable: the outcome is unknown.
        """
        arguments = [self._owner, self._lease_us, max(0, limit), *map(quoted, working)]
        return [_plain(run_id) for run_id in await self._call("claim", arguments, list[bytes])]

    async def release(self, run_ids: Collection[str]) -> None:
        """Give up the leases of these runs, so that any owner may claim them at once. Runs of other owners do not
        change.

        Raises:
            RunStoreUnavailable: the outcome is unknown.
        """
        if run_ids:
            await self._call("release", [self._owner, *map(quoted, run_ids)], int)

    async def renounce(self, run_id: str, *, although_repeated: bool = False) -> bool:
        """Undo a `create` that was rejected to the client, also one whose outcome is unknown. Return whether it was
        undone.

        A `create` of this run that reaches Redis in the ten minutes after this call is rejected. If the request came
        again meanwhile with the same idempotency key, its answer was this run. Then the run stays, and any owner may
        claim it at once, unless ``although_repeated`` is set.

        Raises:
            RunStoreUnavailable: the outcome is unknown.
        """
        return bool(await self._call("renounce", [quoted(run_id), self._owner, int(although_repeated)], int))

    # --- calls that need no lease -------------------------------------------------------------------------------------

    async def read(self, run_id: str, start: int = 0, limit: int | None = None) -> RunLog | None:
        """Read a page of the log from item ``start`` on; None: there is no such run.

        A page has at most `MAX_PAGE_ITEMS` and ``limit`` items, and at most `MAX_PAGE_BYTES` unless it has only one
        item. `RunLog.more` is True if there is another page.

        Raises:
            RunStoreUnavailable: Redis did not answer, or the run's record is damaged.
        """
        most = MAX_PAGE_ITEMS if limit is None else min(max(0, limit), MAX_PAGE_ITEMS)
        start = max(0, start)
        arguments = [quoted(run_id), start, most, MAX_PAGE_BYTES]
        answer = await self._call("read", arguments, list[tuple[_Head, int, tuple[bytes, ...]]])
        if not answer:
            return None
        fields, length, items = answer[0]
        try:
            return RunLog(_head(run_id, fields), start, items, length)
        except msgspec.ValidationError as error:
            raise self._strange(error) from error

    async def follow(self, run_id: str, start: int = 0) -> AsyncIterator[list[bytes]]:
        """Yield the items from ``start`` on, in batches as they are appended, until the log is closed.

        It has no timeout: it waits while no owner works on the run, and while Redis does not answer.

        Raises:
            RunUnknown: there is no such run, or Redis has lost it and no owner created it again within ``lease_s``.
            RunStoreUnavailable: Redis did not answer the first read.
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
                with self._followers.follower(run_id, position) as follower:
                    while (news := await self._followers.take(follower, self._lease_s)) is not None:
                        if news.items:
                            yield list(news.items)
                        if news.ended:
                            return
                    position = follower.position
            try:
                log = await self.read(run_id, position)
            except RunStoreUnavailable:
                log, unknown = None, False
                continue
            if log is None and unknown:
                raise RunUnknown(f"the store has lost run {run_id}")
            unknown = log is None

    async def ask_cancel(self, run_id: str) -> bool:
        """Ask the owner to cancel the run at its next renewal. Return False if the run is unknown or closed."""
        return bool(await self._call("cancel", [quoted(run_id)], int))

    async def secret(self, run_id: str) -> bytes | None:
        """Return the run's secret; None: the run has none, is closed, or is unknown."""
        answer = await self._call("secret", [quoted(run_id)], list[bytes | None])
        return answer[0] if answer else None

    async def runs(
        self, tenant: str, *, program: str | None = None, limit: int = 100, before: float | None = None
    ) -> list[RunHead]:
        """List the runs of a tenant, or of one of its programs, the newest first, without those that are damaged.

        It is empty only where none is left.

        Args:
            tenant: the tenant's name.
            program: the program's id, without its tenant; None: all programs.
            limit: maximum number of runs. The list has at most `MAX_LISTED`.
            before: the ``created_s`` of the last run of the page before; None: the list begins with the newest run.
        """
        name = f"tenant:{quoted(tenant)}" if program is None else f"program:{quoted(tenant)}/{quoted(program)}"
        most = min(limit, MAX_LISTED)
        if most <= 0:
            return []
        heads: list[RunHead] = []
        bound = "+inf" if before is None else f"({round(before * 1e6)}"
        while True:
            answer = await self._call("list", [most, bound], list[tuple[bytes, _Head, bytes]], key=self._space + name)
            for run_id, fields, _ in answer:
                try:
                    heads.append(_head(_plain(run_id), fields))
                except msgspec.ValidationError:
                    self.failures[StoreFailure.CORRUPT] += 1
            if heads or len(answer) < most:
                return heads
            bound = f"({answer[-1][2].decode()}"

    async def keyed(self, tenant: str, key: str) -> str | None:
        """Return the id of the run with this idempotency key; None: there is none."""
        answer = await self._call("keyed", [f"{quoted(tenant)}/{quoted(key)}"], list[bytes])
        return _plain(answer[0]) if answer else None

    async def repeated(self, tenant: str, idempotency: Idempotency) -> AlreadyThere | None:
        """Return the run of a request that has come again with its idempotency key; None: there is none.

        Raises:
            RunStoreUnavailable: Redis did not answer.
        """
        arguments = [f"{quoted(tenant)}/{quoted(idempotency.key)}", idempotency.fingerprint]
        match await self._call("repeated", arguments, list[bytes | int]):
            case [bytes() as run_id, same]:
                return AlreadyThere(_plain(run_id), same_body=bool(same))
        return None

    async def delete(self, run_id: str, *, unless_keyed: bool = False, may_return: bool = False) -> bool:
        """Delete a closed run with its log, its entries in lists and its idempotency key.

        For ten minutes nobody can create it again, so that a former owner does not take it for lost and do it again,
        unless ``may_return`` is set. Return False if the run is unknown, or is kept.

        Args:
            run_id: the run.
            unless_keyed: whether a run with an idempotency key is kept, since its request may come again.
            may_return: whether it may be created again at once.

        Raises:
            RunOpen: the run is not closed.
        """
        answer = await self._call("delete", [quoted(run_id), int(unless_keyed), int(may_return)], bytes)
        if answer == b"open":
            raise RunOpen(f"run {run_id} is open")
        return answer == b"ok"

    async def prolong(self, tenant: str, run_ids: Sequence[str], share: float = 1.0) -> frozenset[str]:
        """Keep closed runs of a tenant as long as if they had been closed now. Others are passed over.

        Return those that are open. They are kept for the retention time from their end on.

        Args:
            tenant: the tenant.
            run_ids: the runs.
            share: the time for which they are kept, as a share of the retention time.
        """
        still_open: set[str] = set()
        for first in range(0, len(run_ids), PROLONGED_AT_ONCE):
            names = map(quoted, run_ids[first : first + PROLONGED_AT_ONCE])
            arguments = [quoted(tenant), int(self._retention_ms * share), *names]
            still_open.update(map(_plain, await self._call("prolong", arguments, list[bytes])))
        return frozenset(still_open)

    async def evict(self, limit: int) -> int:
        """Delete up to ``limit`` closed runs, those that ended first before others. Return their number.

        Raises:
            RunStoreUnavailable: the outcome is unknown.
        """
        return await self._call("evict", [limit], int)

    async def memory(self) -> StoreMemory:
        """Return how much memory Redis uses, see `RedisStore.memory`.

        Raises:
            RunStoreUnavailable: Redis did not answer.
        """
        with self._unavailable():
            return await super().memory()

    async def close(self) -> None:
        """Close the connections. Leases stay valid until they end, unless :meth:`release` has given them up."""
        await self._followers.close()
        await self._following.aclose()
        await super().close()

    # --- Redis --------------------------------------------------------------------------------------------------------

    async def _call(
        self, operation: str, arguments: Sequence[Any], kind: type[_Answer], *, key: str | None = None
    ) -> _Answer:
        with self._unavailable():
            return await self.run(_SCRIPT, [key or self._space + "open"], [operation, *arguments], kind)

    async def _news(self, wanted: Mapping[str, int]) -> Mapping[str, LogUpdate]:
        logs = {f"{self._space}log:{quoted(run_id)}".encode(): run_id for run_id in wanted}
        places: dict[Any, Any] = {key: f"0-{wanted[run_id]}" for key, run_id in logs.items()}
        with self._unavailable():
            async with self.request(extra_s=FOLLOW_S):
                answer = await self._following.xread(
                    places | {self._wake_key: self._wake_seen}, count=FOLLOW_ITEMS, block=int(FOLLOW_S * 1000)
                )
                found = msgspec.convert(answer, list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]])
        news = {}
        for key, entries in found:
            run_id = logs.get(key)
            if run_id is None:
                self._wake_seen = entries[-1][0]
                continue
            items = [fields.get(b"i", b"") for place, fields in entries if place != END]
            news[run_id] = LogUpdate(wanted[run_id], items, ended=entries[-1][0] == END)
        return news

    async def _interrupt_read(self) -> None:
        with self._unavailable():
            async with self.request(), self.redis.pipeline() as pipeline:
                pipeline.xadd(self._wake_key, {"": ""}, maxlen=1, approximate=False)
                pipeline.expire(self._wake_key, WAKE_KEY_S)
                await pipeline.execute()

    def _strange(self, problem: object) -> RunStoreUnavailable:
        reason = self.count(msgspec.ValidationError(f"no answer of ours: {problem!r:.100}"))
        return self._as_unavailable(reason)

    def _as_unavailable(self, reason: StoreFailure) -> RunStoreUnavailable:
        return RunStoreUnavailable(f"the log of {self._kind.named} cannot be used now ({reason})", reason)

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable as error:
            raise self._as_unavailable(error.reason) from error


def _lost(run_id: str) -> RunLeaseLost:
    return RunLeaseLost(f"run {run_id} is another's by now, or closed")


def _plain(quoted: bytes) -> str:
    return unquote_to_bytes(quoted).decode(errors="surrogatepass")


def _head(run_id: str, fields: _Head) -> RunHead:
    """Parse a run's record. It raises ValidationError if the record is damaged."""
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
