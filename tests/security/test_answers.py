"""A request with many answers is as much as many requests."""

from typing import Any

import pytest

from cluster.api.generate import completion_of, named_as_sent
from cluster.core.errors import BadRequest
from cluster.http.requests import MAX_ANSWERS, number_of_answers


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": None, "best_of": 4}, 4),
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


@pytest.mark.parametrize("value", ["2000", 2000.0, 1.0, True, False, "many", [3]])
@pytest.mark.parametrize("field", ["n", "best_of"])
def test_a_number_of_answers_that_only_the_replica_would_read_is_refused(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        number_of_answers({field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    completion = completion_of({"token_ids": [1], "sampling_params": {"n": value}})
    with pytest.raises(BadRequest) as caught:
        number_of_answers(completion)
    assert named_as_sent(caught.value).param == "sampling_params.n"
