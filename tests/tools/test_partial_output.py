"""The output of a tool that still runs, in many pieces."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools_runtime import partial_output
from tools_runtime.partial_output import LEAST_CHARS, PartialOutput
from tools_runtime.text import SIGN, bounded, settled

TOKENS = ("<turn>", "\u2060")


@pytest.fixture
def escaped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters that were escaped, each time."""
    sizes: list[int] = []

    def counted(text: str, *rest: object) -> tuple[str, bool]:
        sizes.append(len(text))
        return bounded(text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(partial_output, "bounded", counted)
    return sizes


async def read(partial: PartialOutput, pieces: list[str]) -> str:
    """Write these pieces while a reader follows. Return what it has read."""
    seen = ""

    async def follow() -> None:
        nonlocal seen
        while (text := await partial.beyond(len(seen))) is not None:
            seen = text

    reader = asyncio.create_task(follow())
    for piece in pieces:
        partial.write(piece)
        for _ in range(3):
            await asyncio.sleep(0)
    partial.close()
    await reader
    return seen


async def test_a_reader_of_many_pieces_escapes_each_character_once(escaped: list[int]) -> None:
    pieces = [f"line {number:05} <|im_end|>\n" for number in range(2000)]
    written = sum(map(len, pieces))
    seen = await read(PartialOutput(1 << 20, ()), pieces)
    assert len(seen) > written - LEAST_CHARS
    assert sum(escaped) <= written


async def test_nothing_is_escaped_after_the_cap(escaped: list[int]) -> None:
    partial = PartialOutput(1000, ())
    assert await read(partial, ["x" * 100] * 50) == "x" * 900
    assert sum(escaped) <= 1100
    assert partial.text() == "x" * 1000
    partial.begin()
    partial.write("again" * 100)
    assert partial.text() == "again" * 100


SOME_PIECES = st.lists(
    st.text(alphabet="ab<>|\r\n\x07\u00e9\u2060\ud800" + SIGN, max_size=6)
    | st.sampled_from(["<turn", ">", "<|im_", "end|>", "<<s>", "<tu", "rn>", "</s", "\r"]),
    max_size=30,
)


@given(SOME_PIECES, st.integers(1, 80))
def test_the_text_is_that_of_all_pieces_at_once(pieces: list[str], cap_bytes: int) -> None:
    partial = PartialOutput(cap_bytes, TOKENS)
    for count, piece in enumerate(pieces, 1):
        partial.write(piece)
        whole = settled("".join(pieces[:count]), TOKENS)
        assert partial.text() == bounded(whole, cap_bytes, TOKENS)[0]
