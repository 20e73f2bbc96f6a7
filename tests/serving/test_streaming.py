"""Pieces of a stream travel together, in order, the first and the last at once."""

import asyncio

import pytest

from cluster.core.stream import Progress, StreamChunk
from replicas.coalescing import Ticks, coalesce

LONG_S = 3600.0


def event(text):
    return StreamChunk(Progress(events=1, token_ids=text.encode()), text)


def data(piece):
    assert piece.progress == Progress(events=len(piece.data), token_ids=piece.data)
    return piece.data


async def test_what_is_ready_together_travels_together_and_nothing_waits_at_the_end() -> None:
    async def chunks():
        for text in ("a", "b", "c"):
            yield event(text)

    assert b"".join([data(piece) async for piece in coalesce(chunks(), Ticks(LONG_S))]) == b"abc"


async def test_the_first_piece_does_not_wait_for_the_interval() -> None:
    go = asyncio.Event()

    async def chunks():
        yield event("1")
        await go.wait()
        yield event("2")
        yield event("3")

    pieces = coalesce(chunks(), Ticks(LONG_S))
    assert data(await anext(pieces)) == b"1"
    go.set()
    assert [data(piece) async for piece in pieces] == [b"23"]


async def test_what_comes_while_the_taker_is_busy_is_not_lost() -> None:
    busy = asyncio.Event()

    async def chunks():
        yield event("a")
        await busy.wait()
        for text in ("b", "c", "d"):
            yield event(text)

    got = []
    async for piece in coalesce(chunks(), Ticks(0.0)):
        got.append(data(piece))
        busy.set()
        for _ in range(3):
            await asyncio.sleep(0)
    assert b"".join(got) == b"abcd"


async def test_what_is_no_event_passes_as_it_is_after_those_before_it() -> None:
    refusal = object()

    async def chunks():
        yield event("a")
        yield refusal

    assert [piece async for piece in coalesce(chunks(), Ticks(LONG_S))] == [
        StreamChunk(Progress(1, b"a"), b"a"),
        refusal,
    ]


async def test_streams_that_send_within_an_interval_send_together() -> None:
    """A receiver of many streams wakes once, not once for each."""
    ticks, woken = Ticks(0.05), []

    async def chunks():
        while True:
            yield event("a")
            await asyncio.sleep(0.001)

    async def take(number: int) -> None:
        pieces = coalesce(chunks(), ticks)
        for _ in range(4):
            await anext(pieces)
            woken.append((round(asyncio.get_running_loop().time(), 2), number))
        await pieces.aclose()

    await asyncio.gather(*map(take, range(5)))
    first, *_ = woken
    assert [number for _, number in woken] == [*range(5)] * 4, "all of one interval, then all of the next"
    assert woken[-1][0] - first[0] >= 0.14


async def test_a_stream_without_tokens_takes_no_time_of_the_replica() -> None:
    """Also with `stream_interval_ms: 0`, which sends each token when it is ready."""
    waits, ready = 0, asyncio.Event()

    class Counted(Ticks):
        def wait(self):
            nonlocal waits
            waits += 1
            return super().wait()

    async def chunks():
        for text in ("a", "b"):
            yield event(text)
            await ready.wait()

    pieces = coalesce(chunks(), Counted(0.0))
    assert data(await anext(pieces)) == b"a"
    following = asyncio.ensure_future(anext(pieces))
    for _ in range(100):
        await asyncio.sleep(0)
    assert waits == 1, "one interval follows the first token; then the next token is waited for"
    ready.set()
    assert data(await following) == b"b"
    await pieces.aclose()


async def test_a_token_after_the_interval_is_sent_at_once() -> None:
    ready = asyncio.Event()

    async def chunks():
        yield event("a")
        await ready.wait()
        yield event("b")
        await asyncio.Event().wait()

    ticks = Ticks(0.01)
    pieces = coalesce(chunks(), ticks)
    assert data(await anext(pieces)) == b"a"
    following = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0.02)
    ticks._interval_s = LONG_S  # an interval that began now would not end
    await asyncio.sleep(0.02)
    ready.set()
    async with asyncio.timeout(10):
        assert data(await following) == b"b"
    await pieces.aclose()


async def test_an_exception_comes_after_what_was_before_it() -> None:
    async def chunks():
        yield event("a")
        raise RuntimeError("broken")

    got = []
    with pytest.raises(RuntimeError, match="broken"):
        async for piece in coalesce(chunks(), Ticks(0.0)):
            got.append(data(piece))
    assert got == [b"a"]


async def test_closing_closes_the_source() -> None:
    closed = asyncio.Event()

    async def chunks():
        try:
            yield event("a")
            await asyncio.Event().wait()
        finally:
            closed.set()

    pieces = coalesce(chunks(), Ticks(0.0))
    await anext(pieces)
    await pieces.aclose()
    assert closed.is_set()
