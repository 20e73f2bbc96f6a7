"""Maps exceptions of Ray, of replicas and of Caesura to HTTP errors. Only this module maps Ray's exceptions."""

from http import HTTPStatus

from fastapi.exceptions import RequestValidationError
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.exceptions import HTTPException

from cluster.api.openai import RETRY_AFTER_S
from cluster.core.errors import (
    BadRequest,
    ControlRefused,
    ControlTimeout,
    EngineGone,
    HttpError,
    Overloaded,
    ReplicaGone,
    ReplicaLost,
    RunStoreUnavailable,
    RunUnknown,
    UpstreamFailed,
)

DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""Ray's exceptions for a call of a process that died before it answered."""


def as_http_error(error: BaseException) -> HttpError:
    """Return the HTTP error of any exception. An unexpected exception gives a 500 without details."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    match cause:
        case HttpError():
            return cause
        case HTTPException():
            return BadRequest(_http_message(cause), status=cause.status_code)
        case RequestValidationError():
            fault = cause.errors()[0]
            param = str(fault["loc"][-1])
            return BadRequest(f"{param}: {fault['msg']}", param=param)
        case ControlRefused():
            return BadRequest(str(cause), status=HTTPStatus.CONFLICT)
        case ControlTimeout():
            return UpstreamFailed(str(cause), status=HTTPStatus.GATEWAY_TIMEOUT, retry_after_s=RETRY_AFTER_S)
        case EngineGone():
            return ReplicaLost("the replica's engine died; it is being replaced", retry_after_s=RETRY_AFTER_S)
        case ReplicaGone():
            return ReplicaLost("the replica is gone; it is being replaced", at_work=False, retry_after_s=RETRY_AFTER_S)
        case RunStoreUnavailable():
            return Overloaded("the program log cannot be reached now; retry later", retry_after_s=RETRY_AFTER_S)
        case RunUnknown():
            return BadRequest("the program's log is gone", status=HTTPStatus.NOT_FOUND)
        case BackPressureError():
            return Overloaded("too many requests wait for a replica; retry later", retry_after_s=RETRY_AFTER_S)
        case TimeoutError():
            return BadRequest("the request took longer than allowed", status=HTTPStatus.REQUEST_TIMEOUT)
    if isinstance(cause, DEATHS):
        return ReplicaLost("the replica died; it is being replaced", retry_after_s=RETRY_AFTER_S)
    if isinstance(cause, RayServeException):
        return Overloaded("no replica can be reached now", retry_after_s=RETRY_AFTER_S)
    if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
        return UpstreamFailed("the replica failed; it is being replaced", retry_after_s=RETRY_AFTER_S)
    return HttpError("internal error", code="internal_error")


def is_loss(error: BaseException) -> bool:
    """Return whether a call failed because its replica is gone. Another replica may then do the same work."""
    return isinstance(error, (ReplicaGone, ReplicaLost, *DEATHS))


def _http_message(error: HTTPException) -> str:
    return {404: "no such route", 405: "the route does not have this method"}.get(error.status_code, str(error.detail))
