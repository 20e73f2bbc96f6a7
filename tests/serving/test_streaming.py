"""Pieces of a stream travel together, in order, the first and the last at once."""

import asyncio

import pytest

from replicas.streaming import coalesce

LONG_S = 3600.0


async def test_what_is_ready_together_travels_together_and_nothing_waits_at_the_end():
    async def chunks():
        for text in ("a", "b", "c"):
            yield text

    assert b"".join([piece async for piece in coalesce(chunks(), LONG_S)]) == b"abc"


async def test_the_first_piece_does_not_wait_for_the_interval():
    go = asyncio.Event()

    async def chunks():
        yield "first"
        await go.wait()
        yield "second"
        yield "third"

    pieces = coalesce(chunks(), LONG_S)
    assert await anext(pieces) == b"first"
    go.set()
    assert [piece async for piece in pieces] == [b"secondthird"]


async def test_what_comes_while_the_taker_is_busy_is_not_lost():
    busy = asyncio.Event()

    async def chunks():
        yield "a"
        await busy.wait()
        for text in ("b", "c", "d"):
            yield text

    got = []
    async for piece in coalesce(chunks(), 0.0):
        got.append(piece)
        busy.set()
        for _ in range(3):
            await asyncio.sleep(0)
    assert b"".join(got) == b"abcd"


async def test_what_is_not_text_passes_as_it_is():
    refusal = object()

    async def chunks():
        yield refusal

    assert [piece async for piece in coalesce(chunks(), LONG_S)] == [refusal]


async def test_an_exception_comes_after_what_was_before_it():
    async def chunks():
        yield "a"
        raise RuntimeError("broken")

    got = []
    with pytest.raises(RuntimeError, match="broken"):
        async for piece in coalesce(chunks(), 0.0):
            got.append(piece)
    assert got == [b"a"]


async def test_closing_closes_the_source():
    closed = asyncio.Event()

    async def chunks():
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    pieces = coalesce(chunks(), 0.0)
    await anext(pieces)
    await pieces.aclose()
    assert closed.is_set()
