"""Requests of token ids in vLLM's form: what they mean, and what is refused with the name of the field."""

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from cluster.api.generate import SAMPLING_FIELDS, completion_of, generate_of, named_as_sent
from cluster.core.errors import BadRequest
from cluster.core.lineage import Attribution, LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.dispatch.placed_calls import prompt_tokens
from cluster.http.requests import number_of_answers
from replicas.requests import parse_request

BODY: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [1, 2, 3],
    "sampling_params": {"n": 2, "max_tokens": 5, "logprobs": 1},
    "stream": True,
    "cache_salt": "salt",
}


def test_it_means_a_completion_and_becomes_vllms_request_again() -> None:
    completion = completion_of(BODY)
    assert completion["prompt"] == [1, 2, 3]
    assert (prompt_tokens(completion), number_of_answers(completion)) == (3, 2)
    assert generate_of(completion) == BODY
    request = parse_request("generate", completion)
    assert (request.token_ids, request.stream, request.cache_salt) == ([1, 2, 3], True, "salt")
    assert (request.sampling_params.n, request.sampling_params.max_tokens) == (2, 5)
    assert request.is_sampling_param_provided("max_tokens")
    assert not parse_request("generate", completion_of({**BODY, "sampling_params": {}})).is_sampling_param_provided(
        "max_tokens"
    )


def test_its_program_is_found_by_the_tokens() -> None:
    index = LineageIndex()
    first = index.attribute(ProgramIdentity(), completion_of({"token_ids": [1] * 200, "sampling_params": {}}))
    assert first.how is Attribution.BEGUN
    assert first.by_prompt is not None
    first.by_prompt.received("", [5, 6])
    index.ended(first)
    longer = {"token_ids": [1] * 200 + [5, 6, 9], "sampling_params": {}}
    second = index.attribute(ProgramIdentity(), completion_of(longer))
    assert (second.how, second.identity.program_id) == (Attribution.CONTINUED, first.identity.program_id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "Hello"}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids.1"),
        ({"token_ids": [True]}, "token_ids.0"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"extra_args": {"caesura": "{}"}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"skip_reading_prefix_cache": True}}, "sampling_params.skip_reading_prefix_cache"),
        ({"content_parts": [{"type": "image_url", "url": "http://10.0.0.1/"}]}, "content_parts"),
        ({"features": {}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"prompt": "Hello"}, "prompt"),
    ],
)
def test_what_is_refused_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion_of({**BODY, **change})
    assert caught.value.param == param


def test_what_vllm_refuses_is_named_as_the_client_sent_it() -> None:
    for sampling, param in (
        ({"temperature": "hot"}, "sampling_params.temperature"),
        ({"max_tokens": 0}, "sampling_params"),
    ):
        with pytest.raises(BadRequest) as caught:
            parse_request("generate", completion_of({**BODY, "sampling_params": sampling}))
        assert (named_as_sent(caught.value).param or "").startswith(param)
    assert named_as_sent(BadRequest("no", param="n")).param == "sampling_params.n"
    assert named_as_sent(BadRequest("no", param="token_ids.3")).param == "token_ids.3"


def test_every_sampling_parameter_is_vllms() -> None:
    assert set(SamplingParams.__struct_fields__) >= SAMPLING_FIELDS
