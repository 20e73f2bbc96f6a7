"""Whether a prompt may be longer than its bound, found without reading all of it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from replicas.continuation import TOOLS
from replicas.program_turn import may_exceed
from replicas.requests import parse_request


class Unread(Mapping[str, Any]):
    """A message that nobody may read."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} was read")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it was read")

    def __len__(self) -> int:
        raise AssertionError("its length was read")


@pytest.mark.parametrize(
    ("value", "most", "may"),
    [
        ("x" * 100, 100, False),
        ("x" * 101, 100, True),
        ("\N{SNOWMAN}" * 26, 100, True),
        ([{"role": "user", "content": "x" * 50}] * 3, 150, True),
        ([{"content": [{"type": "text", "text": "x" * 101}]}], 100, True),
        ([{"tool_calls": [{"function": {"arguments": {"y" * 101: None}}}]}], 100, True),
        ([None, 1, 2.5, True], 100, False),
        ([{"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], 100, True),
    ],
)
def test_the_bytes_of_all_texts_count(value: Any, most: int, may: bool) -> None:
    assert may_exceed(value, most) is may


def test_the_tools_of_a_request_count_in_vllms_form() -> None:
    request = parse_request("chat", {"messages": [], "tools": list(TOOLS) * 10})
    size = len(json.dumps(list(TOOLS) * 10))
    assert may_exceed([request.tools, request.messages], size // 2)
    assert not may_exceed([request.tools, request.messages], 2 * size)


def test_nothing_is_read_after_the_bound() -> None:
    assert may_exceed([Unread(), {"content": "x" * 101}], 100)
