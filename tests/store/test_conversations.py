"""Conversations in a real Redis."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from cluster.core.clock import ManualClock
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store import conversations
from cluster.store.client import StoreUnavailable
from cluster.store.conversations import ConversationStore, StoredConversation, Written
from tests.store.outages import kill

PATIENT_S = 60.0
TENANT_BYTES = 1000


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[ConversationStore]:
    made = ConversationStore(
        server.url, timeout_s=PATIENT_S, retention_s=60.0, tenant_bytes=TENANT_BYTES, clock=ManualClock()
    )
    yield made
    await made.close()


async def test_a_conversation_grows_and_is_deleted(store: ConversationStore) -> None:
    assert await store.create("a", "conv_1", 12.5, b"{}", [b"one"]) is Written.OK
    assert await store.append("a", "conv_1", [b"two", b"three"]) is Written.OK
    assert await store.describe("a", "conv_1", b"[]") is Written.OK
    assert await store.load("a", "conv_1") == StoredConversation(12.5, b"[]", (b"one", b"two", b"three"))
    assert await store.delete("a", "conv_1") is Written.OK
    assert await store.load("a", "conv_1") is None


async def test_tenants_do_not_meet(store: ConversationStore) -> None:
    await store.create("a", "b/c", 0.0, b"", [])
    assert await store.load("a/b", "c") is None
    for written in (store.append("b", "b/c", [b"x"]), store.describe("b", "b/c", b""), store.delete("b", "b/c")):
        assert await written is Written.UNKNOWN


async def test_of_racing_writers_who_know_the_same_one_writes(store: ConversationStore) -> None:
    await store.create("a", "c", 0.0, b"", [b"one"])
    answers = await asyncio.gather(*(store.append("a", "c", [b"%d" % n], known=1) for n in range(20)))
    assert sorted(answers) == [Written.MOVED] * 19 + [Written.OK]
    found = await store.load("a", "c")
    assert found is not None and len(found.entries) == 2


async def test_a_conversation_has_bounds(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_ENTRIES", 2)
    monkeypatch.setattr(conversations, "MAX_BYTES", 8)
    assert await store.create("a", "c", 0.0, b"", [b"12345"]) is Written.OK
    assert await store.append("a", "c", [b"1234"]) is Written.FULL
    assert await store.append("a", "c", [b"1"]) is Written.OK
    assert await store.append("a", "c", [b"1"]) is Written.FULL
    assert await store.create("a", "d", 0.0, b"", [b"123456789"]) is Written.FULL
    assert await store.load("a", "d") is None


async def test_the_conversations_of_a_tenant_have_bytes_together(store: ConversationStore) -> None:
    assert await store.create("a", "one", 0.0, b"m" * 100, [b"x" * 400]) is Written.OK
    assert await store.create("a", "two", 0.0, b"", [b"x" * 501]) is Written.QUOTA
    assert await store.create("a", "two", 0.0, b"", [b"x" * 400]) is Written.OK
    assert await store.append("a", "one", [b"x" * 101]) is Written.QUOTA
    assert await store.describe("a", "two", b"m" * 101) is Written.QUOTA
    assert await store.append("b", "one", [b"x" * 101]) is Written.UNKNOWN
    assert await store.create("b", "one", 0.0, b"", [b"x" * 1000]) is Written.OK
    # What becomes free can be used: metadata, and conversations that are deleted.
    assert await store.describe("a", "one", b"") is Written.OK
    assert await store.append("a", "one", [b"x" * 200]) is Written.OK
    assert await store.append("a", "two", [b"x"]) is Written.QUOTA
    await store.delete("a", "one")
    assert await store.append("a", "two", [b"x" * 600]) is Written.OK


async def test_the_conversations_of_a_tenant_are_bounded_in_number(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)
    answers = [await store.create("a", f"c{number}", 0.0, b"", []) for number in range(3)]
    assert answers == [Written.OK, Written.OK, Written.MANY]
    assert await store.load("a", "c2") is None
    assert await store.create("b", "c", 0.0, b"", []) is Written.OK
    await store.delete("a", "c0")
    assert await store.create("a", "c2", 0.0, b"", []) is Written.OK


async def test_expired_conversations_do_not_count(
    store: ConversationStore, direct: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)
    await store.create("a", "stays", 0.0, b"", [b"x" * 100])
    await store.create("a", "goes", 0.0, b"", [b"x" * 900])
    space = "caesura:v1:{conversations:a}:"
    assert await direct.zscore(f"{space}kept", "goes") is not None
    # What Redis does when their time is over.
    await direct.zadd(f"{space}kept", {"goes": 1.0})
    await direct.delete(f"{space}record:goes", f"{space}entries:goes")
    assert await store.create("a", "next", 0.0, b"", [b"x" * 900]) is Written.OK
    assert await store.append("a", "stays", [b"x"]) is Written.QUOTA
    assert await direct.hgetall(f"{space}sizes") == {b"stays": b"100", b"next": b"900", b"/": b"1000"}


async def test_each_use_postpones_the_expiry(store: ConversationStore, direct: redis.asyncio.Redis) -> None:
    await store.create("a", "c", 0.0, b"", [b"1"])
    for use in (lambda: store.load("a", "c"), lambda: store.append("a", "c", [b"2"])):
        keys = await direct.keys("*conversation*")
        assert len(keys) == 4
        for key in keys:
            await direct.pexpire(key, 5_000)
        await use()
        assert all([await direct.pttl(key) > 50_000 for key in keys])


async def test_responses_are_renewed_once_and_all_again_after_an_eighth_of_the_retention_time(
    store: ConversationStore, direct: redis.asyncio.Redis
) -> None:
    async def renewed() -> int:
        """How many are renewed already. The caller renews the others."""
        found = await store.load("a", "c")
        assert found is not None
        is_all = not found.renewed
        assert await store.renewed("a", "c", len(found.entries), is_all=is_all) is Written.OK
        return found.renewed

    await store.create("a", "c", 0.0, b"", [b"1", b"2"])
    assert [await renewed(), await renewed()] == [0, 2]
    await store.append("a", "c", [b"3"])
    assert [await renewed(), await renewed()] == [2, 3]
    [record] = await direct.keys("*:record:*")
    before_ms = float(await direct.hget(record, "renewed_ms") or 0)
    await direct.hset(record, "renewed_ms", before_ms - 60_000 * conversations.RENEWED_SHARE)
    assert [await renewed(), await renewed()] == [0, 3]


async def test_responses_whose_renewal_failed_are_renewed_at_the_next_use(store: ConversationStore) -> None:
    await store.create("a", "c", 0.0, b"", [b"1", b"2"])
    assert [(await store.load("a", "c")).renewed for _ in range(2)] == [0, 0]
    await store.renewed("a", "c", 1, is_all=True)  # the second one is in progress
    assert [(await store.load("a", "c")).renewed for _ in range(2)] == [1, 1]


async def test_where_memory_is_short_a_conversation_can_be_read(
    store: ConversationStore, direct: redis.asyncio.Redis
) -> None:
    await store.create("a", "c", 0.0, b"", [b"1", b"2"])
    await direct.config_set("maxmemory", 1)
    found = await store.load("a", "c")
    assert found is not None and found.renewed == 0
    assert await store.renewed("a", "c", 2, is_all=True) is Written.OK
    await direct.config_set("maxmemory", 0)
    found = await store.load("a", "c")
    assert found is not None and found.renewed == 2


async def test_without_redis_a_call_raises(store: ConversationStore, server: EmbeddedRedis) -> None:
    await store.create("a", "c", 0.0, b"", [])
    kill(server)
    with pytest.raises(StoreUnavailable):
        await store.load("a", "c")
