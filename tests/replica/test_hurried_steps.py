"""Steps of the policy `caesura` are as large as prompts that run, or could run, need them to be in time."""

from dataclasses import replace

import pytest

from cluster.config.schema import SloConfig
from replicas.policies.caesura import CaesuraParameters
from replicas.policy import LoadView
from tests.replica.policy_views import load

SATURATION = 100
"""Tokens of a step that is no longer than one without prompts, 10 ms, on the replica of `policy_views`."""


def view(prefill_tokens: int, ttft_s: float | None = 1.0, running: int = 10, waiting_tokens: int = 0) -> LoadView:
    plain = load(waiting=0, prefill_tokens=prefill_tokens, running=running, waiting_tokens=waiting_tokens)
    return replace(plain, facts=replace(plain.facts, slo=SloConfig(ttft_s=ttft_s)))


def tokens(at: LoadView) -> int:
    return CaesuraParameters().build().budget.tokens(at)


@pytest.mark.parametrize("prefill_tokens", [0, 100, 1000])
def test_a_short_prompt_is_spread_over_steps_that_cost_nothing(prefill_tokens: int) -> None:
    # 1000 tokens in steps of 100: 10 steps, 0.1 s of the 0.5 s that it may take.
    assert tokens(view(prefill_tokens)) == SATURATION


def test_a_long_prompt_gets_steps_that_end_it_in_time() -> None:
    # 0.4 s to compute 4000 tokens leave 0.1 s, 10 steps of 10 ms beside it: 400 tokens and 10 decodes in each.
    assert tokens(view(4000)) == 410


def test_prompts_that_wait_count_as_far_as_they_fit_into_memory() -> None:
    """3000 tokens are free."""
    assert tokens(view(2000, waiting_tokens=2000)) == tokens(view(1000, waiting_tokens=10_000)) == 410
    assert tokens(view(0, waiting_tokens=10_000)) == tokens(view(3000)) == 160


def test_a_prompt_that_cannot_be_in_time_gets_the_largest_steps() -> None:
    assert tokens(view(5000)) == tokens(view(10_000)) == 1000


def test_without_a_bound_on_the_first_token_nothing_hurries() -> None:
    assert tokens(view(10_000, ttft_s=None, waiting_tokens=3000)) == SATURATION
