import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_service.features import (
    LARGEST,
    PAUSE_FEATURES,
    TURN_FEATURES,
    TURN_WORD_BUCKETS,
    pause_features,
    turn_features,
)
from predictor_service.model import PauseContext, TurnContext

TURN = TurnContext(
    source="agents",
    position=3,
    prompt_tokens=9000,
    new_tokens=120,
    outputs=(40, 700, 12),
    tools=("bash:grep", "edit", "bash:ls"),
    durations_s=(0.2, None, 4.0),
    returned=(120, 15, 300),
    text="Traceback (most recent call last): ...",
    offered=("bash", "edit"),
)
ANY_NUMBER = st.one_of(st.integers(-(10**400), 10**400), st.floats())
ANY_TEXT = st.text(st.characters(), max_size=200)


@given(
    number=ANY_NUMBER,
    history=st.lists(ANY_NUMBER, max_size=12),
    names=st.lists(ANY_TEXT, max_size=12),
    text=ANY_TEXT,
)
def test_whatever_a_context_says_every_number_is_finite_and_small(number, history, names, text) -> None:
    turn = TurnContext(
        text, number, number, number, *map(tuple, (history, names, history, history)), text, tuple(names)
    )
    pause = PauseContext(turn, text, number, text)
    for vectors in (turn_features([turn]), pause_features([pause])):
        assert np.isfinite(vectors).all()
        assert np.abs(vectors).max() <= LARGEST


def test_lone_surrogates_and_huge_texts_are_texts() -> None:
    huge = replace(TURN, text="\ud800 no such character " + "word " * 1_000_000, tools=("\udfff",))
    assert np.isfinite(turn_features([huge])).all()


@pytest.mark.parametrize(
    "change",
    [
        {"source": "others"},
        {"position": 4},
        {"prompt_tokens": 90_000},
        {"new_tokens": 5000},
        {"outputs": (41, 700, 12)},
        {"tools": ("bash:cat", "edit", "bash:ls")},
        {"tools": ("bash:grep", "edit", "bash:cat")},
        {"durations_s": (0.2, 0.2, 4.0)},
        {"returned": (120, 15, 3000)},
        {"text": "all tests passed"},
        {"offered": ("bash",)},
    ],
)
def test_each_part_of_a_turn_is_seen(change) -> None:
    one, other = turn_features([TURN, replace(TURN, **change)])
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "change", [{"tool": "bash:cat"}, {"tool": "edit"}, {"output_tokens": 999}, {"arguments": "pytest -x"}]
)
def test_each_part_of_a_pause_is_seen_and_the_turn_is_as_before(change) -> None:
    pause = PauseContext(TURN, "bash:grep", 40, "grep -rn thing .")
    one, other = pause_features([pause, replace(pause, **change)])
    of_turn = TURN_FEATURES - TURN_WORD_BUCKETS
    assert np.array_equal(one[:of_turn], turn_features([TURN])[0][:of_turn])
    assert np.array_equal(one[:of_turn], other[:of_turn])
    assert not np.array_equal(one[of_turn:], other[of_turn:])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    others = [TurnContext(text="something else"), TurnContext()]
    assert np.array_equal(turn_features([*others, TURN])[2], turn_features([TURN])[0])
    assert turn_features([]).shape == (0, TURN_FEATURES)
    assert pause_features([]).shape == (0, PAUSE_FEATURES)


def test_another_process_sees_the_same() -> None:
    """A bundle is asked in other processes than it was learnt in; Python's own hashes differ between them."""
    program = (
        "from tests.predictor.test_features import TURN, turn_features; print(turn_features([TURN]).tobytes().hex())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert there == turn_features([TURN]).tobytes().hex()
