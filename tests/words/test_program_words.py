"""The words for programs: what crosses the wire comes back the same; keys do not meet."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.program import MAX_ID_LENGTH, Hints, Prediction, ProgramIdentity, ToolPrediction, tool_key

IDS = st.none() | st.text(min_size=1, max_size=MAX_ID_LENGTH)
SECONDS = st.none() | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
HINTS = st.builds(
    Hints,
    priority=st.none() | st.integers(),
    expected_output_tokens=st.none() | st.integers(min_value=0),
    deadline_s=SECONDS,
    expected_tool=IDS,
    last_tool=IDS,
    expected_pause_s=SECONDS,
    retention_s=SECONDS,
)
NUMBERS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
TOOLS = st.lists(st.builds(ToolPrediction, st.text(), NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple)
FORECASTS = st.builds(Prediction, *[NUMBERS] * 7, tools=TOOLS)
IDENTITIES = st.builds(
    ProgramIdentity,
    program_id=IDS,
    parent_id=IDS,
    tenant=st.text(min_size=1, max_size=MAX_ID_LENGTH),
    last_turn=st.booleans(),
    hints=HINTS,
    forecast=st.none() | FORECASTS,
)


@given(IDENTITIES)
def test_what_is_encoded_is_decoded(identity: ProgramIdentity) -> None:
    assert ProgramIdentity.decode(identity.encode()) == identity


def test_the_encoding_says_only_what_was_said() -> None:
    assert json.loads(ProgramIdentity("p").encode()) == {"program_id": "p", "tenant": "default", "last_turn": False}
    assert "hints" in json.loads(ProgramIdentity(hints=Hints(priority=0)).encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"hints": 3}',
        '{"who": 1}',
        '{"hints": {"colour": 1}}',
        '{"forecast": 3}',
        '{"forecast": {}}',
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ProgramIdentity.decode(text)


def test_key_is_scoped_by_tenant() -> None:
    assert ProgramIdentity("p", tenant="t").key == "t/p"
    assert ProgramIdentity(tenant="t").key is None


@given(st.lists(st.sampled_from(["grep", "ls", "cat"]), min_size=1))
def test_tool_key_ignores_order_and_repetition(tools: list[str]) -> None:
    assert tool_key(tuple(tools)) == tool_key(tuple(reversed(tools))) == tool_key(tuple(set(tools)))


def test_tool_key_is_bounded() -> None:
    assert len(tool_key(tuple(f"tool-{i}" for i in range(1000)))) == MAX_ID_LENGTH
