"""A request with many answers is as much as many requests."""

from typing import Any

import pytest

from cluster.core.errors import BadRequest
from cluster.http.requests import MAX_ANSWERS, number_of_answers


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": None, "best_of": 4}, 4),
        ({"n": True}, 1),
        ({"n": "many"}, 1),
        ({"n": -1}, 1),
        ({"prompt": "x", "n": 2}, 2),
        ({"prompt": ["x", "y"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
    ],
)
def test_answers_are_counted(body: dict[str, Any], number: int) -> None:
    assert number_of_answers(body) == number


@pytest.mark.parametrize("body", [{"n": 2000}, {"prompt": ["x"] * (MAX_ANSWERS + 1)}, {"n": 65, "prompt": ["x", "y"]}])
def test_too_many_answers_are_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="at most 128 are generated") as caught:
        number_of_answers(body)
    assert caught.value.param in body
