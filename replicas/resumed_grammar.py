"""The grammar of a resumed turn: it begins behind the tokens that were generated elsewhere.

vLLM takes them for a part of the prompt (`replicas.resumption`), which a grammar does not look at. Of vLLM 0.29's
StructuredOutputManager this wraps `_create_grammar`, and uses what decides there whether a token is reasoning.
"""

from collections.abc import Sequence
from typing import Any

RESUMED_KEY = "caesura_resumed"
"""The key of ``SamplingParams.extra_args`` that tells how many of the prompt's last tokens are this turn's output."""


def resumed_tokens(request: Any) -> int:
    """How many of the last tokens of the prompt of vLLM's ``request`` were generated elsewhere."""
    extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
    known: int = extra.get(RESUMED_KEY, 0)
    return known


def advance_grammars(manager: Any) -> None:
    """Let every grammar that ``manager`` makes from now on begin where its request does."""
    create = manager._create_grammar

    def advanced(request: Any) -> Any:
        grammar = create(request)
        known = resumed_tokens(request)
        if known:
            ids = _without_reasoning(manager, request, list(request.prompt_token_ids), known)
            if ids and not grammar.accept_tokens(request.request_id, ids):
                raise ValueError("the tokens that were generated elsewhere do not fit the grammar")
        return grammar

    manager._create_grammar = advanced


def _without_reasoning(manager: Any, request: Any, ids: list[int], known: int) -> Sequence[int]:
    """The known tokens that are the grammar's; notes in ``request`` where among them the reasoning ended."""
    asked = request.structured_output_request
    reasoner = manager._get_reasoner(request)
    if manager.enable_in_reasoning or asked.reasoning_ended is True or reasoner is None:
        return ids[-known:]
    begin = len(ids) - known
    if asked.reasoning_ended is None and reasoner.is_reasoning_end(ids[:begin]):
        asked.reasoning_ended = True
        return ids[begin:]
    asked.reasoning_ended = False
    for position in range(begin, len(ids)):
        if reasoner.is_reasoning_end_streaming(ids[: position + 1], [ids[position]]):
            asked.reasoning_ended = True
            return ids[position + 1 :]
    return ()
