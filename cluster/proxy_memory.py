"""In the proxy's process: what Ray's proxy needed for an answer is freed when the answer has ended.

In Ray Serve 2.60 the end of a stream, an exception, knows the frame that waited for it, and that frame knows the task
that ended with it: some hundred objects a request, with what Ray's core keeps for them, were left to the garbage
collector. The process grew for hours for it. (tests/serving/test_proxy_memory.py tells when this can go.)
"""

from typing import Any

from ray.serve._private.proxy_response_generator import ProxyResponseGenerator

_next_of_ray = ProxyResponseGenerator._get_next_streaming_result


async def _next(self: ProxyResponseGenerator) -> Any:
    try:
        return await _next_of_ray(self)
    except StopAsyncIteration as end:
        raise end.with_traceback(None)  # noqa: B904 - it is the same exception


def install() -> None:
    """Let every answer of this process end so. Again is harmless."""
    ProxyResponseGenerator._get_next_streaming_result = _next
