"""The route with which a client that runs its own tools sends their output while they run.

It is an extension of OpenAI's API: `POST /v1/chat/completions/prefill`. Each request is complete in itself, so that a
lost, late or repeated one does no harm.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from cluster.core.errors import BadRequest
from cluster.core.program import ProgramIdentity
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.runs.chat_api import asks_for_loop


async def prefill(
    fleet: ReplicaClients, body: Mapping[str, Any], identity: ProgramIdentity, timeout_s: float
) -> Response:
    """Let the program's replica compute its next prompt as far as it is known. Return whether it does.

    Args:
        fleet: asks the replica.
        body: the body of the next chat completion. Its last message is a tool's answer, which may go on.
        identity: the identity of the program.
        timeout_s: seconds within which the replica has to answer.

    Raises:
        BadRequest: no program is named, the last message is no answer of a tool, or the body is invalid.
        TimeoutError: the replica did not answer in time.
    """
    if identity.key is None:
        raise BadRequest("the request names no program; its id is the header x-session-id", param="session_id")
    if asks_for_loop(body):
        raise BadRequest("the cluster runs these tools, and knows their output; leave out server_side", param="tools")
    async with asyncio.timeout(timeout_s):
        reason = await fleet.extend(identity.key, body, None)
    return JSONResponse({"object": "chat.completion.prefill", "accepted": reason is None, "reason": reason})
