"""Which model a program of a class goes to."""

import pytest

from cluster.config.models import ClassRule
from router.model_choice import Chosen, TurnFacts, choose_model

CODING = (
    ClassRule(model="big", tools=("bash", "edit_*"), max_start_s=2.0),
    ClassRule(model="long", min_prompt_tokens=10_000),
    ClassRule(model="middle", max_prompt_tokens=500),
    ClassRule(model="small"),
)
IDLE = {"big": 0.1, "long": 0.1, "middle": 0.1, "small": 0.1}


def choice(tools: set[str], prompt_tokens: int, start_s: dict[str, float | None]) -> tuple[str, Chosen]:
    chosen = choose_model(CODING, TurnFacts(frozenset(tools), prompt_tokens), start_s)
    return chosen.model, chosen.reason


@pytest.mark.parametrize(
    ("tools", "prompt_tokens", "model"),
    [
        ({"edit_file"}, 100, "big"),
        ({"search", "bash"}, 100_000, "big"),
        ({"search"}, 100_000, "long"),
        ({"BASH"}, 500, "middle"),
        (set(), 501, "small"),
    ],
)
def test_the_first_rule_that_holds(tools: set[str], prompt_tokens: int, model: str) -> None:
    assert choice(tools, prompt_tokens, IDLE) == (model, Chosen.RULE)


def test_a_busy_model_is_passed_over() -> None:
    assert choice({"bash"}, 100, {**IDLE, "big": 2.0}) == ("big", Chosen.RULE)
    assert choice({"bash"}, 100, {**IDLE, "big": 2.1}) == ("middle", Chosen.RULE)


def test_a_model_without_replicas_is_passed_over() -> None:
    assert choice({"bash"}, 100, {**IDLE, "big": None}) == ("middle", Chosen.RULE)


def test_where_no_rule_holds_the_one_that_starts_soonest() -> None:
    # The rule that always holds leads to a model without a replica.
    start_s = {"big": 9.0, "long": 0.0, "middle": None, "small": None}
    assert choice({"bash"}, 100, start_s) == ("big", Chosen.LEAST_LOADED)


def test_where_nothing_is_known_the_last_rule() -> None:
    assert choice({"bash"}, 100, {}) == ("small", Chosen.LAST)
