"""`/admin/drain`: empty a replica before it is stopped, without a turn that fails."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from cluster.errors import BadRequest, ReplicaGone
from cluster.fleet import Fleet
from cluster.validation import validated


class DrainOrder(BaseModel):
    """The body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    replica: str = Field(min_length=1, max_length=256)
    drain: bool = True


async def drain(fleet: Fleet, body: Mapping[str, Any]) -> Response:
    """Begin or end the draining of a replica: nothing new comes to it, and its programs leave at their next pause.

    Raises:
        BadRequest: there is no such replica, or the router is Ray's own and cannot do it.
    """
    order = validated(DrainOrder, body)
    if not fleet.ours:
        raise BadRequest("this router places no programs, so that none can leave; see router.name")
    try:
        await fleet.to(order.replica, "drain", order.drain)
    except ReplicaGone as error:
        raise BadRequest(str(error), status=HTTPStatus.NOT_FOUND, param="replica") from error
    return JSONResponse({"replica": order.replica, "draining": order.drain})
