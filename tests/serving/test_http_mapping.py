"""The boundary: what each exception of Ray and ours means to a client; and the path of a field at fault."""

import inspect
import subprocess
import sys

import pydantic
import pytest
import ray.exceptions
import ray.serve.exceptions
from fastapi import HTTPException
from ray.serve.exceptions import BackPressureError

from cluster.api.ray_errors import as_http_error
from cluster.api.validation import field_path, validated
from cluster.core import errors
from cluster.core.errors import (
    BadRequest,
    ControlRefused,
    ControlTimeout,
    EngineGone,
    HttpError,
    RunStoreUnavailable,
    RunUnknown,
)


def classes(module, root):
    return [kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, root)]


def bare(kind):
    """An instance without running its constructor, whose arguments do not matter to the map."""
    return kind.__new__(kind)


FOREIGN = [
    *classes(ray.exceptions, ray.exceptions.RayError),
    *classes(ray.serve.exceptions, ray.serve.exceptions.RayServeException),
    *classes(errors, errors.CaesuraError),
    RuntimeError,
    KeyError,
    OSError,
    TimeoutError,
]


@pytest.mark.parametrize("kind", [k for k in FOREIGN if k is not HttpError and not issubclass(k, HttpError)])
def test_the_map_is_total(kind) -> None:
    exception = bare(kind)
    if isinstance(exception, ray.exceptions.RayTaskError):
        exception.cause = RuntimeError("inside the replica")
    mapped = as_http_error(exception)
    assert isinstance(mapped, HttpError)
    assert 400 <= mapped.status < 600


@pytest.mark.parametrize(
    ("exception", "status", "retry"),
    [
        (BadRequest("x", status=413), 413, False),
        (HTTPException(404, "Not Found"), 404, False),
        (HTTPException(405), 405, False),
        (ControlRefused("x"), 409, False),
        (ControlTimeout("x"), 504, True),
        (EngineGone("x"), 502, True),
        (RunStoreUnavailable("x", "timeout"), 503, True),
        (RunUnknown("x"), 404, False),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), 503, True),
        (ray.serve.exceptions.DeploymentUnavailableError("x"), 503, True),
        (bare(ray.exceptions.ActorDiedError), 502, True),
        (bare(ray.exceptions.ActorUnavailableError), 502, True),
        (bare(ray.exceptions.WorkerCrashedError), 502, True),
        (TimeoutError(), 408, False),
        (RuntimeError("secret"), 500, False),
    ],
)
def test_what_exceptions_mean(exception, status, retry) -> None:
    mapped = as_http_error(exception)
    assert (mapped.status, mapped.retry_after_s is not None) == (status, retry)
    assert "secret" not in mapped.message


def test_what_a_replica_raised_is_found_within_rays_wrapping() -> None:
    wrapped = ray.exceptions.RayTaskError("f", "traceback", ControlRefused("why")).as_instanceof_cause()
    mapped = as_http_error(wrapped)
    assert (mapped.status, mapped.message) == (409, "why")


def test_a_path_leads_through_the_body_and_not_through_types() -> None:
    body = {"messages": [{"role": "user", "content": 5}]}
    location = ("messages", 0, "ChatCompletionUserMessageParam", "content", "str")
    assert field_path(body, location) == ["messages", "0", "content"]


def test_a_whole_body_at_fault_has_no_path() -> None:
    class Pair(pydantic.BaseModel):
        a: int = 0

        @pydantic.model_validator(mode="after")
        def check(self):
            raise ValueError("never right")

    with pytest.raises(BadRequest) as caught:
        validated(Pair, {"a": 1})
    assert caught.value.param is None


def test_the_ingress_starts_without_vllm() -> None:
    code = "import cluster.http.ingress, sys; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("exception", "lost"),
    [
        (EngineGone("x"), True),
        (bare(ray.exceptions.ActorDiedError), True),
        (bare(ray.exceptions.ActorUnavailableError), True),
        (bare(ray.exceptions.WorkerCrashedError), True),
        (bare(ray.exceptions.NodeDiedError), True),
        (bare(ray.exceptions.TaskCancelledError), False),
        (ray.serve.exceptions.DeploymentUnavailableError("x"), False),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), False),
        (TimeoutError(), False),
        (RuntimeError("a bug"), False),
    ],
)
def test_only_a_replicas_death_is_a_loss_after_which_another_is_asked(exception, lost) -> None:
    assert isinstance(as_http_error(exception), errors.ReplicaLost) is lost
