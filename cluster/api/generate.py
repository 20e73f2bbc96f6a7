"""vLLM's API of token ids, `POST /inference/v1/generate`: token ids in, token ids and log probabilities out.

The body becomes that of a completion whose prompt is token ids, with vLLM's sampling parameters at the top. So programs
are found, placed, predicted and limited as those of completions are. A replica makes vLLM's request of it again
(`replicas.token_requests`).
"""

from collections.abc import Mapping
from typing import Any

from cluster.core.errors import BadRequest, HttpError

SAMPLING = "sampling_params"

FIELDS = frozenset({"model", "stream", "stream_options", "cache_salt", "request_id", "vllm_xargs"})
"""Fields of the body that are passed on as they are."""

IGNORED = frozenset({"assistant_tokens_mask", "token_offsets"})
"""Fields of vLLM's render step, which generation does not use."""

REFUSED: Mapping[str, str] = {
    "features": "images and other media are not accepted here; use /v1/chat/completions",
    "content_parts": "images and other media are not accepted here; use /v1/chat/completions",
    "kv_transfer_params": "KV is not transferred for single requests",
    "ec_transfer_params": "encoder caches are not transferred for single requests",
}
"""Fields that vLLM's own server reads and Caesura does not, with the reason."""

SAMPLING_FIELDS = frozenset(
    {
        *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
        *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget"),
        *("repetition_detection", "output_kind"),
    }
)
"""The sampling parameters that a client may set. The others of vLLM's are internal to the server. vLLM sets
`output_kind` itself, whatever a client sends."""


def completion_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the completion that a body of `/inference/v1/generate` means.

    Raises:
        BadRequest: a field is missing, invalid, unknown or refused. `param` names it.
    """
    for name in body:
        if name in REFUSED and body[name] is not None:
            raise BadRequest(f"{name}: {REFUSED[name]}", param=name)
        if name not in FIELDS | IGNORED | REFUSED.keys() | {SAMPLING, "token_ids"}:
            raise BadRequest(f"{name}: unknown field", param=name)
    ids, sampling = body.get("token_ids"), body.get(SAMPLING)
    if not isinstance(ids, list) or not ids:
        raise BadRequest("token_ids must be a list of token ids with at least one", param="token_ids")
    for place, one in enumerate(ids):
        if type(one) is not int or one < 0:
            raise BadRequest(f"token_ids.{place} must be a token id, a whole number from 0", param=f"token_ids.{place}")
    if not isinstance(sampling, Mapping):
        raise BadRequest(f"{SAMPLING} must be an object", param=SAMPLING)
    for name in sampling:
        if name not in SAMPLING_FIELDS:
            raise BadRequest(f"{SAMPLING}.{name}: unknown field", param=f"{SAMPLING}.{name}")
    return {**sampling, **{name: body[name] for name in FIELDS if name in body}, "prompt": ids}


def generate_of(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `/inference/v1/generate` from the result of `completion_of`."""
    body = {name: completion[name] for name in FIELDS if name in completion}
    sampling = {name: value for name, value in completion.items() if name in SAMPLING_FIELDS}
    return {**body, "token_ids": completion["prompt"], SAMPLING: sampling}


def named_as_sent(refusal: HttpError) -> HttpError:
    """Let an error about the completion name the field of the client's body. Return the error."""
    first = (refusal.param or "").partition(".")[0]
    if first in SAMPLING_FIELDS:
        refusal.param = f"{SAMPLING}.{refusal.param}"
    return refusal
