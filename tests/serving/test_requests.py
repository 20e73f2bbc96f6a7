"""vLLM's request models: what they refuse is a 400 that names the field; its exceptions stay in the replica."""

import inspect
from http import HTTPStatus

import pytest
import vllm.exceptions
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.core.errors import BadRequest, HttpError
from replicas.requests import as_refusal, of_response, parse_request


@pytest.mark.parametrize(
    ("method", "body", "param"),
    [
        ("chat", {}, "messages"),
        ("chat", {"messages": "hello"}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("chat", {"messages": [], "tools": [{"type": "function", "function": {}}]}, "tools.0.function"),
        ("chat", {"messages": [], "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "a", "n": "many"}, "n"),
        ("completions", {"prompt": [1, -2]}, "prompt.1"),
        ("completions", {"prompt": "a", "stop": 5}, "stop"),
        ("completions", {"prompt": "a", "logprobs": -3}, "logprobs"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("completions", {"prompt": "a", "structured_outputs": 5}, ""),
        ("completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"messages": 5}, "messages"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_a_field_at_fault_is_named(method, body, param) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(method, body)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize(
    "kind", [k for _, k in inspect.getmembers(vllm.exceptions, inspect.isclass) if issubclass(k, Exception)]
)
def test_every_exception_of_vllm_means_something(kind) -> None:
    error = kind.__new__(kind)  # without its constructor, whose arguments differ
    error.http_status = error.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    refusal = as_refusal(error)
    assert isinstance(refusal, HttpError)
    assert 400 <= refusal.status < 600


@pytest.mark.parametrize(
    ("exception", "status", "param"),
    [
        (vllm.exceptions.VLLMValidationError("bad", parameter="n", value="secret"), 400, "n"),
        (EngineDeadError(), 502, None),
        (ValueError("bad"), 400, None),
        (OverflowError("bad"), 400, None),
        (RuntimeError("secret"), 500, None),
        (BadRequest("bad", status=413, param="x"), 413, "x"),
    ],
)
def test_what_exceptions_mean(exception, status, param) -> None:
    refusal = as_refusal(exception)
    assert (refusal.status, refusal.param) == (status, param)
    assert "secret" not in refusal.message


def test_vllms_error_body_keeps_its_status_and_param() -> None:
    answer = ErrorResponse(error=ErrorInfo(message="too long", type="BadRequestError", param="prompt", code=400))
    refusal = of_response(answer)
    assert (refusal.status, refusal.param, refusal.type) == (400, "prompt", "invalid_request_error")
    broken = of_response(ErrorResponse(error=ErrorInfo(message="secret", type="InternalServerError", code=500)))
    assert (broken.status, broken.type, broken.message) == (500, "server_error", "internal error")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("This model's maximum context length is 100 tokens. However, you requested 60.", "context_length_exceeded"),
        (
            "The prompt (length 90) is longer than the maximum model length of 80. Make it shorter.",
            "context_length_exceeded",
        ),
        ("temperature must be in [0, 2]", None),
    ],
)
def test_a_prompt_that_does_not_fit_has_the_code_that_agents_know(message, code) -> None:
    assert as_refusal(vllm.exceptions.VLLMValidationError(message)).code == code
    answer = ErrorResponse(error=ErrorInfo(message=message, type="BadRequestError", code=400))
    assert of_response(answer).code == code
