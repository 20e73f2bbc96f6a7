"""vLLM's request of token ids (`/inference/v1/generate`), and its answer.

It uses these names of vLLM 0.29 (tests/contracts/test_resumption.py runs them):
    GenerateRequest, ServingTokens.serve_tokens, which GenerateBaseServing's other requests resemble
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse as VLLMErrorResponse

from cluster.api.generate import generate_of
from cluster.api.validation import validated
from replicas.vllm_versions import GeneratedTokens

SESSION_HEADER = "x-session-id"


class TokenRequest(GenerateRequest):
    """vLLM's request, with the fields by which its other requests name the program."""

    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None


def token_request(completion: Mapping[str, Any]) -> TokenRequest:
    """Make the request from the body of the completion that it means, see `cluster.api.generate`.

    Raises:
        BadRequest: vLLM's model rejects it.
    """
    return validated(TokenRequest, generate_of(completion))


async def generated(serving: Any, request: TokenRequest, info: RawRequestInfo) -> AsyncGenerator[Any]:
    """Yield vLLM's answer: its events, or the one whole answer, or its error.

    Args:
        serving: vLLM's ServingTokens.
        request: the request.
        info: the headers that vLLM may see.
    """
    if request.vllm_xargs:
        own = request.sampling_params.extra_args
        request.sampling_params.extra_args = {**(own or {}), **request.vllm_xargs}
    headers = {**info.headers, "x-request-id": request.request_id}
    if request.session_id is not None:
        headers[SESSION_HEADER] = request.session_id
    raw = RawRequestInfo.to_starlette_request_optional(RawRequestInfo(headers=headers))
    answer = await serving.serve_tokens(request, raw)
    if isinstance(answer, VLLMErrorResponse):
        yield ErrorResponse(error=ErrorInfo(**answer.error.model_dump()))
    elif isinstance(answer, GeneratedTokens):
        yield answer
    else:
        async for event in answer:
            yield event
