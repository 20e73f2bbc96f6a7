"""Turns that a stop string ends.

vLLM 0.29 finds stop strings in the process in front of its engine, and then aborts the request there. Its scheduler
cannot tell such a turn from one whose client has left, and the program would lose its context. `mark_stopped` and
`stop` mark the ids of these requests in the message to the engine. `sorted_ids` reads the mark.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

MARK = "caesura-stopped/"
"""Precedes the id of a request in vLLM's message that aborts it. vLLM ignores ids that it does not know."""


def mark_stopped(client: Any) -> None:
    """Let vLLM's AsyncLLM mark the requests that a stop string ends."""
    if _chooses_engine(client):
        return
    process: Callable[..., Any] = client.output_processor.process_outputs

    def marked(*arguments: Any, **options: Any) -> Any:
        processed = process(*arguments, **options)
        processed.reqs_to_abort[:] = [MARK + one for one in processed.reqs_to_abort]
        return processed

    client.output_processor.process_outputs = marked


async def stop(client: Any, name: str) -> None:
    """End a request, as a stop string was found in its text.

    Args:
        client: vLLM's AsyncLLM.
        name: the request's name. vLLM gives its parts other ids.
    """
    if not _chooses_engine(client):
        ids = client.output_processor.external_req_ids.get(name, ())
        await client.engine_core.abort_requests_async([MARK + one for one in ids])


def sorted_ids(ids: Iterable[str], known: Container[str]) -> tuple[list[str], list[str]]:
    """Return the ids of the requests that a stop string ended, without their mark, and all others.

    Args:
        ids: what vLLM shall abort.
        known: the ids of all requests. A client may have chosen a name that begins like a mark.
    """
    stopped: list[str] = []
    others: list[str] = []
    for one in ids:
        if one.startswith(MARK) and one not in known:
            stopped.append(one.removeprefix(MARK))
        else:
            others.append(one)
    return stopped, others


def _chooses_engine(client: Any) -> bool:
    """Return whether the client sends each request to one of several engines, which it finds by the id."""
    return hasattr(client.engine_core, "reqs_in_flight")
