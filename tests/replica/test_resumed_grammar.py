"""The grammar of a resumed turn begins behind what was generated elsewhere, and behind its reasoning."""

from types import SimpleNamespace
from typing import Any

import pytest

from replicas.vllm_patches import RESUMED_KEY, advance_grammars

END = 9
"""The token that ends the reasoning."""


class Reasoner:
    def is_reasoning_end(self, ids: list[int]) -> bool:
        return END in ids

    def is_reasoning_end_streaming(self, ids: list[int], delta: list[int]) -> bool:
        return END in delta


class Grammar:
    """Takes what is below 50."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, request_id: str, ids: list[int]) -> bool:
        self.accepted += ids
        return all(number < 50 for number in ids)


class Grammars:
    """vLLM's StructuredOutputManager as far as it is used."""

    def __init__(self, *, reasons: bool, enable_in_reasoning: bool = False) -> None:
        self._reasoner = Reasoner() if reasons else None
        self.enable_in_reasoning = enable_in_reasoning
        advance_grammars(self)

    def _create_grammar(self, request: Any) -> Grammar:
        return Grammar()

    def _get_reasoner(self, request: Any) -> Reasoner | None:
        return self._reasoner


def request(prompt: list[int], known: list[int], ended: bool | None) -> Any:
    extra = {RESUMED_KEY: len(known)} if known else None
    return SimpleNamespace(
        request_id="one",
        prompt_token_ids=prompt + known,
        sampling_params=SimpleNamespace(extra_args=extra),
        structured_output_request=SimpleNamespace(reasoning_ended=ended),
    )


@pytest.mark.parametrize(
    ("known", "ended", "accepted", "ended_after"),
    [
        ([], False, [], False),
        ([4, 5], False, [], False),
        ([4, END], False, [], True),
        ([4, END, 6, 7], False, [6, 7], True),
        ([4, END, 6, END], False, [6, END], True),
        ([4, 5], True, [4, 5], True),
        ([4, 5], None, [], False),
    ],
)
def test_only_what_comes_after_the_reasoning_is_the_grammars(
    known: list[int], ended: bool | None, accepted: list[int], ended_after: bool
) -> None:
    asked = request([1, 2], known, ended)
    assert Grammars(reasons=True)._create_grammar(asked).accepted == accepted
    assert asked.structured_output_request.reasoning_ended is ended_after


def test_a_prompt_may_end_the_reasoning_itself() -> None:
    asked = request([1, END], [4, 5], None)
    assert Grammars(reasons=True)._create_grammar(asked).accepted == [4, 5]


@pytest.mark.parametrize("grammars", [Grammars(reasons=False), Grammars(reasons=True, enable_in_reasoning=True)])
def test_without_reasoning_all_of_it_is(grammars: Grammars) -> None:
    assert grammars._create_grammar(request([1, 2], [4, END, 5], False)).accepted == [4, END, 5]


def test_what_does_not_fit_fails_that_request_only() -> None:
    with pytest.raises(ValueError, match="grammar"):
        Grammars(reasons=False)._create_grammar(request([1], [4, 70], False))
