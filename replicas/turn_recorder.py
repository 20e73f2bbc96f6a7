"""Records the exact tokens of one request: its prompt, and the ids and log probabilities of its answers.

It also knows which version of the model's weights computed each token. The engine reports at a change of the weights
how many tokens each request has, since outputs may reach this process later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.core.stream import Ending
from cluster.core.turn import pack_ids
from cluster.core.turn_tokens import AnswerTokens, TurnTokens, WeightSpan, pack_logprobs


class WeightSpans:
    """The versions of the weights that computed one output.

    Args:
        before: the versions of the tokens that were computed elsewhere.
        known: the number of these tokens.
        version: the version now.
    """

    def __init__(self, before: Sequence[WeightSpan], known: int, version: str) -> None:
        self._spans = list(before)
        self._known = known
        self.changed(0, version)

    def changed(self, tokens: int, version: str) -> None:
        """Record that the weights were changed after so many tokens of the engine's request."""
        start = self._known + tokens
        if self._spans and self._spans[-1].start >= start:
            self._spans.pop()
        if not self._spans or self._spans[-1].version != version:
            self._spans.append(WeightSpan(start, version))

    @property
    def spans(self) -> tuple[WeightSpan, ...]:
        """The versions, in the order of the tokens."""
        return tuple(self._spans)


@dataclass(slots=True)
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ending: Ending | None = None


class TurnRecorder:
    """The recorded tokens of one request.

    Args:
        prompt: the prompt's token ids.
        answers: the number of answers of the request.
        is_delta: whether each output of the engine has only new tokens; otherwise it has all.
    """

    def __init__(self, prompt: Sequence[int], answers: int, *, is_delta: bool) -> None:
        self._prompt = prompt
        self._answers = [_Answer() for _ in range(answers)]
        self._is_delta = is_delta

    def add(
        self, index: int, ids: Sequence[int], logprobs: Iterable[Mapping[int, Any]] | None, ending: Ending | None
    ) -> None:
        """Record an output of one answer: its ids, vLLM's log probabilities of each, and why it ended."""
        answer = self._answers[index]
        if not self._is_delta:
            answer.token_ids.clear()
            answer.logprobs.clear()
        answer.token_ids.extend(ids)
        answer.logprobs.extend(one[token].logprob for token, one in zip(ids, logprobs or (), strict=False))
        answer.ending = ending or answer.ending

    def tokens(self, weights: Sequence[WeightSpans]) -> TurnTokens | None:
        """Return the tokens of the turn; None: it has not ended, or log probabilities are missing.

        ``weights`` has the versions of each answer.
        """
        # This is asked at each output of any answer, so that nothing is packed before the last one has ended.
        endings = [one.ending for one in self._answers if one.ending and len(one.logprobs) == len(one.token_ids)]
        if len(endings) < len(self._answers):
            return None
        answers = []
        for index, (answer, ending, versions) in enumerate(zip(self._answers, endings, weights, strict=True)):
            ids, logprobs = pack_ids(answer.token_ids), pack_logprobs(answer.logprobs)
            reasons = (ending.finish_reason, ending.stop_reason)
            answers.append(AnswerTokens(index, ids, logprobs, *reasons, versions.spans))
        return TurnTokens(pack_ids(self._prompt), tuple(answers))
