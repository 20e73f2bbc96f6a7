"""How much of the prefix cache a client's turns used, of what an exact continuation could have used.

A turn is an exact continuation if its prompt begins with the prompt and the output of the turn before it. It can then
reuse all whole blocks of that context, without the last output token, whose KV is never computed. It can never reuse
the last token of its own prompt. All numbers are those that `GET /v1/programs/{program_id}` reports for each turn. The
token ids of turns that clients run are not reported, so that whatever a client, or the chat template, changes in its
history counts as not reused: the share of what the two prompts have in common is at least as high.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

Turn = Mapping[str, int]


def reusable_tokens(before: Turn, after: Turn, block_tokens: int) -> int:
    """How many prompt tokens the turn ``after`` could reuse if it continued ``before`` exactly."""
    context = before["prompt_tokens"] + before["output_tokens"] - 1
    return min(context, after["prompt_tokens"] - 1) // block_tokens * block_tokens


def reused_shares(turns: Sequence[Turn], block_tokens: int) -> list[float]:
    """For each turn but the first: its cached tokens, over those that it could reuse."""
    return [
        after["cached_tokens"] / reusable
        for before, after in pairwise(turns)
        if (reusable := reusable_tokens(before, after, block_tokens))
    ]
