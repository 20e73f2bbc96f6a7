"""The share of reused tokens, on numbers made by hand."""

from tests.clients.reuse import reusable_tokens, reused_shares


def turn(prompt: int, cached: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}


def test_the_last_output_token_and_the_last_prompt_token_are_never_reused() -> None:
    assert reusable_tokens(turn(30, 0, 2), turn(50, 0, 1), 16) == 16
    assert reusable_tokens(turn(30, 0, 3), turn(50, 0, 1), 16) == 32
    assert reusable_tokens(turn(30, 0, 9), turn(32, 0, 1), 16) == 16


def test_the_share_is_of_the_context_and_not_of_the_prompt_before() -> None:
    turns = [turn(160, 0, 33), turn(200, 160, 10), turn(240, 208, 10)]
    assert reused_shares(turns, 16) == [160 / 192, 208 / 208]


def test_turns_below_one_block_have_no_share() -> None:
    assert reused_shares([turn(5, 0, 3), turn(10, 0, 3)], 16) == []
