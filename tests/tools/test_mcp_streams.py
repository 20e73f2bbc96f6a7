"""How messages of MCP servers are cut while they are read."""

from collections.abc import AsyncIterator

import httpx2
import pydantic_core
import pytest

from tools_runtime import mcp_streams
from tools_runtime.mcp_streams import CUT, Message, Room, _BoundedStream, shortened

ROOM = Room(300)
LONG = "x" * 5000


class Chunks(httpx2.AsyncByteStream):
    """A body that comes in pieces of 50 bytes."""

    def __init__(self, body: str) -> None:
        self._body = body.encode()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), 50):
            yield self._body[start : start + 50]

    async def aclose(self) -> None:
        """Nothing."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the long messages that were parsed."""
    sizes: list[int] = []

    def counted(message: Message) -> object:
        sizes.append(len(message.text))
        return shortened(message)

    monkeypatch.setattr(mcp_streams, "shortened", counted)
    return sizes


async def read(body: str, *, events: bool) -> bytes:
    return b"".join([part async for part in _BoundedStream(Chunks(body), ROOM, events=events)])


async def test_a_long_message_that_nobody_waits_for_is_parsed_when_it_is_too_long_and_at_its_end(
    parsed: list[int],
) -> None:
    notification = f'data: {{"jsonrpc":"2.0","method":"notifications/message","params":{{"data":"{LONG}"}}}}\n'
    answer = 'data: {"jsonrpc":"2.0","id":1,"result":{"content":[]}}\n'
    assert await read(notification * 2 + answer, events=True) == b"\n\n" + answer.encode()
    assert len(parsed) == 4


async def test_a_long_answer_whose_id_comes_last_is_parsed_twice(parsed: list[int]) -> None:
    body = f'{{"jsonrpc":"2.0","result":{{"content":[{{"type":"text","text":"{LONG}"}}]}},"id":7}}'
    answer = pydantic_core.from_json(await read(body, events=False))
    assert (answer["id"], answer["result"]["_meta"]) == (7, {CUT: True})
    assert LONG.startswith(answer["result"]["content"][0]["text"])
    assert len(parsed) == 2


async def test_the_rest_of_a_long_answer_is_not_fetched(parsed: list[int]) -> None:
    body = f'{{"jsonrpc":"2.0","id":7,"result":{{"content":[{{"type":"text","text":"{LONG}"}}]}}}}'
    assert pydantic_core.from_json(await read(body, events=False))["id"] == 7
    assert len(parsed) == 1
