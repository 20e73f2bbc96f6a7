"""The log probabilities of a stream that continues on another replica.

The known ones are sent along. The engine makes no text for the rest of a stream, so the texts of the tokens in the new
ones are made here, as vLLM makes them. It uses these names of vLLM 0.29 (tests/contracts/test_resumption.py):
    LogprobsProcessor._verify_tokens, _get_sampled_context_ids
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.logprobs import Logprob
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.logprobs import LogprobsProcessor

from cluster.core.stream import TokenLogprobs

Position = Mapping[int, Logprob]


def packed(positions: Iterable[Position]) -> list[TokenLogprobs]:
    """Pack vLLM's log probabilities, one value for each token."""
    return [
        TokenLogprobs(
            tuple(one),
            tuple(each.logprob for each in one.values()),
            tuple(each.rank for each in one.values()),
            tuple(each.decoded_token for each in one.values()),
        )
        for one in positions
    ]


class ResumedLogprobs:
    """The log probabilities of all tokens of a resumed stream.

    Args:
        tokenizer: the engine's tokenizer; None: the request wants no text.
        known: those of the tokens that are known.
    """

    def __init__(self, tokenizer: Any, known: Sequence[TokenLogprobs]) -> None:
        self._all: list[dict[int, Logprob]] = [
            {
                token: Logprob(logprob, rank, text)
                for token, logprob, rank, text in zip(one.token_ids, one.logprobs, one.ranks, one.texts, strict=True)
            }
            for one in known
        ]
        self._processor = LogprobsProcessor(tokenizer, self._all, None, None, None, None)
        self._tokenizer = tokenizer

    def known(self, begin: int, end: int) -> list[dict[int, Logprob]]:
        """Return those of known tokens."""
        return self._all[begin:end]

    def add(self, positions: Iterable[Position]) -> list[dict[int, Logprob]]:
        """Take those of new tokens, and return them with the tokens' texts."""
        made = []
        for position in positions:
            ids = list(position)
            texts: Sequence[str | None] = [None] * len(ids)
            if self._tokenizer is not None:
                context = self._processor._get_sampled_context_ids(self._all)
                decoded = convert_ids_list_to_tokens(self._tokenizer, ids)
                texts = self._processor._verify_tokens(decoded, ids, context)
            one = {
                token: Logprob(each.logprob, each.rank, text)
                for (token, each), text in zip(position.items(), texts, strict=True)
            }
            self._all.append(one)
            made.append(one)
        return made
