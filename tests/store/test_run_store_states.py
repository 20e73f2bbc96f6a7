"""Whatever owners do in whatever order, and however often they repeat it: a log is one exact sequence."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cluster.core.errors import RunLeaseLost, RunLogGap, RunOpen, RunUnknown
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.runs.records import AlreadyThere, Created, Idempotency, NewRun
from cluster.store.runs.store import RunStore

OWNERS = ("a", "b", "c")
OPEN = "caesura:v1:{runs}:open"
KEY = Idempotency("key", b"body")
Answer = TypeVar("Answer")


class LogMachine(RuleBasedStateMachine):
    """One run. ``log`` is what it must hold; None: the store does not know it."""

    url: str

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.direct = redis.Redis.from_url(self.url)
        self.direct.flushall()
        arguments: dict[str, Any] = {"timeout_s": 10.0, "lease_s": 600.0, "retention_s": 3600.0}
        self.stores = {name: RunStore(self.url, owner=name, **arguments) for name in OWNERS}
        self.log: list[bytes] | None = None
        self.owner: str | None = None
        self.closed = False
        self.deleted = False
        """Whether the run was deleted a short time ago."""
        self.written = 0

    def teardown(self) -> None:
        for store in self.stores.values():
            self.await_(store.close())
        self.direct.close()
        self.loop.close()

    def await_(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return self.loop.run_until_complete(call)

    def new_items(self, count: int) -> list[bytes]:
        self.written += count
        return [b"%d" % number for number in range(self.written - count, self.written)]

    def refused(self, kind: type[Exception], call: Coroutine[Any, Any, object]) -> None:
        with pytest.raises(kind):
            self.await_(call)

    @rule(name=st.sampled_from(OWNERS), count=st.integers(1, 3))
    def create(self, name: str, count: int) -> None:
        store, items = self.stores[name], self.new_items(count)
        call = store.create(NewRun("run", "tenant", "program", idempotency=KEY), items)
        if self.log is not None or self.deleted:
            self.refused(RunLeaseLost, call)
            return
        assert self.await_(call) == Created("run")
        self.log, self.owner, self.closed = items, name, False

    @precondition(lambda self: self.log is not None and self.owner and not self.closed)
    @rule(missing=st.integers(0, 3))
    def create_again(self, missing: int) -> None:
        items = self.log[: max(1, len(self.log) - missing)] + self.new_items(1 if missing == 0 else 0)
        self.await_(self.stores[self.owner].create(NewRun("run", "tenant", "program", idempotency=KEY), items))
        self.log = items if missing == 0 else self.log

    @rule(name=st.sampled_from(OWNERS))
    def create_another(self, name: str) -> None:
        if self.log is not None:
            other = NewRun("other", "tenant", "program", idempotency=KEY)
            assert self.await_(self.stores[name].create(other, [b"other"])) == AlreadyThere("run", same_body=True)

    @rule(name=st.sampled_from(OWNERS), back=st.integers(-2, 4), count=st.integers(0, 3), final=st.booleans())
    def append(self, name: str, back: int, count: int, final: bool) -> None:
        """From ``back`` items before the end on, what is there and ``count`` new ones."""
        there = self.log or []
        start = max(0, len(there) - back)
        items = there[start:] + self.new_items(count)
        call = self.stores[name].append("run", start, items, final=final)
        if self.log is None:
            self.refused(RunLeaseLost if self.deleted else RunUnknown, call)
        elif name != self.owner:
            self.refused(RunLeaseLost, call)
        elif start > len(there):
            self.refused(RunLogGap, call)
        elif self.closed and (count or not final):
            self.refused(RunLeaseLost, call)
        else:
            self.await_(call)
            self.log, self.closed = there[:start] + items, self.closed or final

    @precondition(lambda self: self.log is not None)
    @rule(name=st.sampled_from(OWNERS), place=st.integers(0, 5))
    def append_others(self, name: str, place: int) -> None:
        start = place % len(self.log)
        self.refused(RunLeaseLost, self.stores[name].append("run", start, self.new_items(2), final=True))

    @rule(name=st.sampled_from(OWNERS), working=st.booleans())
    def claim(self, name: str, working: bool) -> None:
        self.direct.zadd(OPEN, {"run": 1}, xx=True)
        claimed = self.await_(self.stores[name].claim(10, ["run"] if working else []))
        can = self.log is not None and not self.closed and not working
        assert claimed == (["run"] if can else [])
        self.owner = name if can else self.owner

    @rule(name=st.sampled_from(OWNERS))
    def release(self, name: str) -> None:
        self.await_(self.stores[name].release(["run"]))
        if name == self.owner and not self.closed:
            self.owner = None

    @rule(name=st.sampled_from(OWNERS))
    def renew(self, name: str) -> None:
        renewal = self.await_(self.stores[name].renew(["run"]))
        assert bool(renewal.unknown) == (self.log is None and not self.deleted)
        assert bool(renewal.lost) == (self.deleted if self.log is None else self.owner != name)

    @rule(name=st.sampled_from(OWNERS))
    def delete(self, name: str) -> None:
        call = self.stores[name].delete("run")
        if self.log is not None and not self.closed:
            self.refused(RunOpen, call)
            return
        assert self.await_(call) == (self.log is not None)
        self.deleted = self.deleted or self.log is not None
        self.forget()

    @precondition(lambda self: self.deleted)
    @rule()
    def ten_minutes_pass(self) -> None:
        assert self.direct.delete("caesura:v1:{runs}:gone:run") == 1
        self.deleted = False

    @rule(key=st.sampled_from(["run:run", "log:run", None]))
    def lose(self, key: str | None) -> None:
        if key is None:
            self.direct.flushall()
            self.deleted = False
        else:
            self.direct.delete("caesura:v1:{runs}:" + key)
        self.forget()

    def forget(self) -> None:
        self.log, self.owner, self.closed = None, None, False

    @invariant()
    def the_log_is_what_was_written(self) -> None:
        if not hasattr(self, "stores"):
            return
        for start in (0, 2):
            log = self.await_(self.stores["a"].read("run", start))
            assert (log and list(log.items)) == (None if self.log is None else self.log[start:])
            assert log is None or log.closed == self.closed
        assert len(self.await_(self.stores["a"].runs("tenant"))) == (self.log is not None)
        if self.closed:
            assert self.await_(self.followed()) == self.log

    async def followed(self) -> list[bytes]:
        return [item async for batch in self.stores["b"].follow("run") for item in batch]


def test_a_log_is_one_exact_sequence(server: EmbeddedRedis) -> None:
    LogMachine.url = server.url
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
