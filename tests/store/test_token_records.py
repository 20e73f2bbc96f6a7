"""Recorded tokens in a real Redis."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from cluster.core.clock import ManualClock
from cluster.core.turn import pack_ids, unpack_ids
from cluster.core.turn_tokens import AnswerTokens, TurnTokens, WeightSpan, pack_logprobs, unpack_logprobs
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store import token_records
from cluster.store.client import StoreUnavailable
from cluster.store.token_records import (
    Deletion,
    FullMemory,
    RecordBounds,
    RecordedPage,
    RecordedTurn,
    TokenRecordStore,
    TurnHead,
)
from tests.store.outages import kill

PATIENT_S = 60.0
HEAD = TurnHead("request-1", "chat", "tiny", None, 12.5)
WIDE = RecordBounds(1 << 20, 1 << 20, 1 << 20)


def store_of(server: EmbeddedRedis, bounds: RecordBounds = WIDE, retention_s: float = 60.0) -> TokenRecordStore:
    return TokenRecordStore(
        server.url, timeout_s=PATIENT_S, retention_s=retention_s, bounds=bounds, clock=ManualClock()
    )


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[TokenRecordStore]:
    made = store_of(server)
    yield made
    await made.close()


def tokens(prompt: list[int], *outputs: list[int]) -> TurnTokens:
    return TurnTokens(
        pack_ids(prompt),
        tuple(
            AnswerTokens(
                index, pack_ids(output), pack_logprobs([-0.5] * len(output)), "stop", None, (WeightSpan(0, "a"),)
            )
            for index, output in enumerate(outputs)
        ),
    )


async def turns_of(store: TokenRecordStore, tenant: str, program: str) -> list[RecordedTurn]:
    """All recorded turns."""
    page = await store.page(tenant, program, 0, 1000)
    return [] if page is None else list(page.turns)


async def test_a_turn_is_known_from_its_begin_and_complete_at_its_end(store: TokenRecordStore) -> None:
    assert await turns_of(store, "t", "p") == []
    assert await store.begin("t", "p", HEAD, uuid4().bytes) == 1
    assert await turns_of(store, "t", "p") == [RecordedTurn(1, HEAD)]
    made = tokens([1, 2, 3], [4, 5], [6])
    assert await store.finish("t", "p", 1, 20.0, made)
    assert await turns_of(store, "t", "p") == [RecordedTurn(1, HEAD, 20.0, made)]
    assert unpack_logprobs(made.answers[0].logprobs) == [-0.5, -0.5]


async def test_prompts_are_exact_though_only_their_ends_are_stored(store: TokenRecordStore) -> None:
    chance = random.Random(7)
    made: dict[int, TurnTokens] = {}
    context: list[int] = []
    for _ in range(40):
        numbers = [await store.begin("t", "p", HEAD, uuid4().bytes) for _ in range(chance.choice([1, 1, 2]))]
        chance.shuffle(numbers)
        for number in numbers:
            assert isinstance(number, int)
            kept = context[: chance.choice([len(context), len(context), len(context) // 2, 0])]
            turn = tokens(
                kept + chance.choices(range(300), k=chance.randrange(30)) or [1], chance.choices(range(300), k=5)
            )
            assert await store.finish("t", "p", number, 1.0, turn)
            made[number] = turn
            context = unpack_ids(turn.prompt + turn.answers[0].token_ids)
    assert {turn.number: turn.tokens for turn in await turns_of(store, "t", "p")} == made


async def test_a_page_has_its_turns_alone(store: TokenRecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await store.page("t", "p", 0, 10) is None
    context: list[int] = []
    for turn in range(1, 8):
        await store.begin("t", "p", HEAD, uuid4().bytes)
        context.append(turn)
        await store.finish("t", "p", turn, 1.0, tokens(context, [turn]))
        context.append(turn)
    await store.begin("t", "p", HEAD, uuid4().bytes)
    built, prompt = list[int](), token_records._prompt

    def noted(number: int, parts: Any) -> bytes:
        built.append(number)
        return prompt(number, parts)

    monkeypatch.setattr(token_records, "_prompt", noted)
    page = await store.page("t", "p", 4, 2)
    assert page is not None and page.more
    assert [turn.tokens for turn in page.turns] == [
        tokens([one for before in range(1, number) for one in (before, before)] + [number], [number])
        for number in (5, 6)
    ]
    assert built == [5, 6]
    last = await store.page("t", "p", 6, 2)
    assert last is not None and not last.more
    assert [turn.tokens is None for turn in last.turns] == [False, True]
    assert await store.page("t", "p", 8, 2) == RecordedPage((), more=False)


async def test_a_long_program_takes_little_more_than_its_context(store: TokenRecordStore) -> None:
    context = list(range(1000))
    for _ in range(30):
        number = await store.begin("t", "p", HEAD, uuid4().bytes)
        assert isinstance(number, int)
        await store.finish("t", "p", number, 1.0, tokens(context, [7] * 10))
        context += [7] * 10 + [8] * 10
    assert await store.sweep() < 3 * 4 * len(context)


async def test_a_turn_begins_once_though_the_call_is_repeated(store: TokenRecordStore) -> None:
    assert [await store.begin("t", "p", HEAD, key) for key in (b"a", b"a", b"b", b"a")] == [1, 1, 2, 1]
    assert len(await turns_of(store, "t", "p")) == 2


async def test_a_failed_turn_is_left_out(store: TokenRecordStore) -> None:
    for key in (b"a", b"b"):
        await store.begin("t", "p", HEAD, key)
    await store.drop("t", "p", 1, b"a")
    await store.finish("t", "p", 2, 1.0, tokens([1], [2]))
    await store.drop("t", "p", 2, b"b")  # too late: it has ended
    assert [turn.number for turn in await turns_of(store, "t", "p")] == [2]


async def test_a_program_is_listed_while_it_has_turns(store: TokenRecordStore) -> None:
    for number, key in enumerate((b"a", b"b"), 1):
        assert await store.begin("t", "p", HEAD, key) == number
    await store.drop("t", "p", 1, b"a")
    assert [name for name, _ in await store.list("t", 10)] == ["p"]
    await store.drop("t", "p", 2, b"b")
    assert await store.list("t", 10) == [] == await turns_of(store, "t", "p")
    assert await store.delete("t", "p") is Deletion.UNKNOWN
    assert await store.sweep() == 0


async def test_a_repeated_removal_leaves_another_turn_of_the_same_number(store: TokenRecordStore) -> None:
    assert await store.begin("t", "p", HEAD, b"a") == 1
    await store.drop("t", "p", 1, b"a")
    assert await store.begin("t", "p", HEAD, b"b") == 1
    await store.drop("t", "p", 1, b"a")
    assert await turns_of(store, "t", "p") == [RecordedTurn(1, HEAD)]


async def test_a_turn_that_is_written_again_stays_as_it_is(store: TokenRecordStore) -> None:
    await store.begin("t", "p", HEAD, uuid4().bytes)
    for ids in ([2], [3]):
        assert await store.finish("t", "p", 1, 1.0, tokens([1], ids))
    [turn] = await turns_of(store, "t", "p")
    assert turn.tokens == tokens([1], [2])
    assert not await store.finish("t", "p", 9, 1.0, tokens([1], [2]))


@pytest.mark.parametrize(
    ("bounds", "full"),
    [
        (RecordBounds(500, 9000, 9000), FullMemory.PROGRAM),
        (RecordBounds(9000, 500, 9000), FullMemory.TENANT),
        (RecordBounds(9000, 9000, 500), FullMemory.ALL),
    ],
)
async def test_a_bound_refuses_new_turns_and_completes_old_ones(
    server: EmbeddedRedis, bounds: RecordBounds, full: FullMemory
) -> None:
    store = store_of(server, bounds)
    assert [await store.begin("t", "p", HEAD, uuid4().bytes) for _ in range(2)] == [1, 2]
    for number in (1, 2):
        assert await store.finish("t", "p", number, 1.0, tokens([1] * 50, [2] * 50))
    assert await store.begin("t", "p", HEAD, uuid4().bytes) is full
    assert isinstance(await store.begin("t", "q", HEAD, uuid4().bytes), int) is (full is FullMemory.PROGRAM)
    assert isinstance(await store.begin("u", "p", HEAD, uuid4().bytes), int) is (full is not FullMemory.ALL)
    assert await store.delete("t", "p", 1) is Deletion.NEWER
    assert await store.delete("t", "p", 2) is Deletion.OK
    assert await store.begin("t", "p", HEAD, uuid4().bytes) == 1
    await store.close()


async def test_records_expire_and_leave_no_bytes(server: EmbeddedRedis) -> None:
    store = store_of(server, retention_s=0.2)
    await store.begin("t", "p", HEAD, uuid4().bytes)
    await store.finish("t", "p", 1, 1.0, tokens([1], [2]))
    assert await store.sweep() > 0
    await asyncio.sleep(0.4)
    assert await store.sweep() == 0
    assert await turns_of(store, "t", "p") == []
    assert not await store.finish("t", "p", 1, 1.0, tokens([1], [2]))
    await store.redis.aclose()


async def test_programs_are_listed_and_tenants_do_not_meet(store: TokenRecordStore) -> None:
    for name in ("b", "a/ä", "c"):
        await store.begin("t", name, HEAD, uuid4().bytes)
    await store.begin("t/a", "x", HEAD, uuid4().bytes)
    names = [name for name, _ in await store.list("t", 10)]
    assert sorted(names) == ["a/ä", "b", "c"]
    first = await store.list("t", 2)
    assert [name for name, _ in first + await store.list("t", 2, first[-1][0])] == names
    assert await turns_of(store, "t/a", "ä") == []
    assert await store.delete("u", "b") is Deletion.UNKNOWN


async def test_an_outage_is_an_error(server: EmbeddedRedis, store: TokenRecordStore) -> None:
    kill(server)
    with pytest.raises(StoreUnavailable):
        await store.begin("t", "p", HEAD, uuid4().bytes)
