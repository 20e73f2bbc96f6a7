"""How much of the tools' answers a turn's prompt has: all where they fit, else as much as leaves the model room."""

from dataclasses import dataclass

import pytest

from replicas.fitted_answers import MIN_CHARS, SEARCH_STEPS, fitted

WINDOW = 32_000


@dataclass
class Prompt:
    tokens: int


class Conversation:
    """One of ``tokens``, with answers of these characters, each a token."""

    def __init__(self, tokens: int, *answers: int) -> None:
        self.tokens = tokens
        self.answers = answers
        self.made: list[int | None] = []

    async def make(self, chars: int | None) -> Prompt | None:
        self.made.append(chars)
        tokens = self.tokens + sum(one if chars is None else min(one, chars) for one in self.answers)
        return Prompt(tokens) if tokens < WINDOW else None

    async def fitted(self, wanted: int | None = None) -> tuple[int, int | None] | None:
        """The prompt's tokens, and the characters of its longer answers."""
        fit = await fitted(self.make, max(self.answers), WINDOW, wanted)
        return None if fit is None else (fit.prompt.tokens, fit.chars)


async def test_answers_that_fit_stay_whole_and_cost_one_prompt() -> None:
    conversation = Conversation(1000, 20_000)
    assert await conversation.fitted() == (21_000, None)
    assert conversation.made == [None]


async def test_a_long_answer_leaves_the_model_an_eighth_of_the_window() -> None:
    conversation = Conversation(1000, 64_000)
    fit = await conversation.fitted()
    assert fit is not None and fit[1] is not None
    assert WINDOW - WINDOW // 8 - 300 < fit[0] <= WINDOW - WINDOW // 8
    assert fit[1] == fit[0] - 1000
    assert len(conversation.made) == 2 + SEARCH_STEPS


async def test_the_longest_answers_are_cut_to_one_length_and_short_ones_stay() -> None:
    fit = await Conversation(1000, 500, 40_000, 50_000).fitted()
    assert fit is not None and fit[1] is not None
    assert fit[0] == 1000 + 500 + 2 * fit[1]


async def test_a_turn_that_may_say_little_needs_little_room() -> None:
    assert await Conversation(1000, 30_900).fitted(wanted=100) == (31_900, None)
    fit = await Conversation(1000, 30_950).fitted(wanted=100)
    assert fit is not None and fit[1] is not None and fit[0] <= WINDOW - 100


async def test_where_little_is_left_answers_get_half_of_it() -> None:
    """Else an answer in the rest of the window would be cut to nothing, or would leave the model no token."""
    fit = await Conversation(30_000, 64_000).fitted()
    assert fit is not None and fit[1] is not None
    assert 800 < fit[1] <= 1000 + MIN_CHARS
    assert await Conversation(30_000, 900).fitted() == (30_900, None)


@pytest.mark.parametrize("answers", [(64_000,), (100, 50)])
async def test_a_conversation_without_room_for_the_shortest_answer_does_not_fit(answers: tuple[int, ...]) -> None:
    assert await Conversation(31_950, *answers).fitted() is None


async def test_short_answers_are_never_cut() -> None:
    assert await Conversation(31_000, MIN_CHARS).fitted() == (31_000 + MIN_CHARS, None)
