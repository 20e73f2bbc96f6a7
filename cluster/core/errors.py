"""Every exception that Caesura raises deliberately.

    CaesuraError
    ├── ConfigError            a configuration file, an environment override or a flag       (exit status 2)
    ├── TraceError             a line of a trace file                                        (exit status 2)
    ├── IllegalTransition      an event that a program's lifecycle does not allow; a bug in Caesura
    ├── IntegrityError         blocks or counts do not add up; a bug in Caesura
    ├── ControlError           the side channel into a replica's scheduler
    │   ├── ControlTimeout     the scheduler did not answer in time
    │   ├── ControlRefused     the scheduler rejected the request as invalid
    │   └── EngineGone         the engine is dead and will not answer again
    ├── ReplicaGone            the replica that a call names does not exist (any more)
    ├── ToolError              a tool call failed; the executor turns it into a result
    │   ├── ToolRefused        nothing was run: an unknown tool, invalid arguments, a forbidden address, no sandbox
    │   ├── ToolFailed         the tool ran and failed, or could not be reached
    │   └── ToolUnknown        the tool may have run: the process that ran it is gone
    ├── RunError               the log of a program's run
    │   ├── RunStoreUnavailable  the store gave no usable answer; a write may have been done
    │   ├── RunUnknown         the store has no such run: it never existed, or has expired
    │   ├── RunLeaseLost       another runner has the run's lease, or the run is closed
    │   ├── RunLogGap          items before the first given one are missing
    │   └── RunOpen            only a closed run can be deleted
    └── HttpError              becomes an OpenAI error body
        ├── BadRequest         400  (also 404, 413, 415, 431 through `status`)
        │   ├── Unauthorized   401  no API key, or an unknown or expired one
        │   ├── Forbidden      403  the API key does not allow this
        │   ├── IdempotencyConflict  422  an idempotency key was reused with another body
        │   └── Quarantined    422  replicas died while they worked on the request
        ├── ProgramMoved       409  the program's home is another replica; the ingress sends the turn there
        ├── Overloaded         503  with Retry-After
        │   └── TooManyRequests  429  a tenant exceeded its limit
        └── UpstreamFailed     502  a replica failed while it answered
            └── ReplicaLost    502  the replica died; another one may answer

Exceptions of libraries are mapped at one boundary each: pydantic's in `cluster.config` and `cluster.api.validation`,
Ray's in `cluster.api.ray_errors`, Redis's in `cluster.store`, vLLM's in `replicas.requests`, the death of its engine in
`replicas.control`, and those of tools and of the libraries that call them in `tools_runtime.kinds`.
"""


class CaesuraError(Exception):
    """The base class of all errors that Caesura raises deliberately."""


class ConfigError(CaesuraError):
    """A configuration value that cannot be used. The message names the file and the key's path."""


class TraceError(CaesuraError):
    """A trace line that cannot be used. The message names the file, the line and the key."""


class IllegalTransition(CaesuraError):
    """An event that the lifecycle does not allow. The message has the program's history. Nothing was changed."""


class IntegrityError(CaesuraError):
    """An invariant of an object that owns resources does not hold."""


class ControlError(CaesuraError):
    """A call through the side channel into a replica's scheduler failed."""


class ControlTimeout(ControlError):
    """The scheduler did not answer in time. It is unknown whether it acted on the request."""


class ControlRefused(ControlError):
    """The scheduler rejected the request as invalid. Nothing was changed."""


class EngineGone(ControlError):
    """The engine behind the side channel is dead."""


class ReplicaGone(CaesuraError):
    """The replica that a call names does not exist, or no longer. The call reached no replica."""


class ToolError(CaesuraError):
    """A tool call failed. The message is written for the model and for the caller."""


class ToolRefused(ToolError):
    """The call was rejected before anything ran. The same call would be rejected again."""


class ToolFailed(ToolError):
    """The tool failed.

    Attributes:
        transient: whether the same call may succeed later.
        note: a remark beside the tool's own message. It is kept when that message is cut.
    """

    def __init__(self, message: str, *, transient: bool = False, note: str = "") -> None:
        super().__init__(message)
        self.transient = transient
        self.note = note


class ToolUnknown(ToolError):
    """The process that ran the tool is gone. It is unknown whether the tool took effect."""


class RunError(CaesuraError):
    """The log of a program's run cannot be read or written."""


class RunStoreUnavailable(RunError):
    """The store gave no usable answer. It is unknown whether a write was done. Every write can be repeated.

    Attributes:
        reason: a `cluster.store.StoreFailure`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RunUnknown(RunError):
    """The store has no such run: it never existed, it has expired, or the store has lost its data."""


class RunLeaseLost(RunError):
    """Another runner has the run's lease, or the run is closed. Nothing was written. The receiver stops the run."""


class RunLogGap(RunError):
    """Items before the first appended one are missing, because the store has lost them. Nothing was written.

    Attributes:
        expected: the number that the next item must have.
    """

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class RunOpen(RunError):
    """The run is not closed yet, so that it cannot be deleted."""


class HttpError(CaesuraError):
    """An error that the HTTP client receives, in OpenAI's error body.

    Attributes:
        status: HTTP status code.
        type: OpenAI error type.
        param: the invalid field of the request; None: no single field is invalid.
        code: a machine-readable reason; None: there is none.
        retry_after_s: seconds after which a retry may succeed; None: the client receives no `Retry-After`.
    """

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status if status is not None else type(self).status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Code of the error of a prompt that does not fit into the context window. Agents then shorten their history."""

STORE_FULL = "store_full"
"""Code of a rejection because the store has no room for what a request keeps, or a bound on it is reached."""


class BadRequest(HttpError):
    """The client's request is invalid."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(BadRequest):
    """The request has no API key, or an unknown or expired one."""

    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class Forbidden(BadRequest):
    """The caller's API key does not allow this request."""

    status = 403
    type = "permission_error"


class IdempotencyConflict(BadRequest):
    """An idempotency key was reused with another body."""

    status = 422


class ProgramMoved(HttpError):
    """A turn reached a replica that its program has left. The ingress looks up the program's home and sends the turn
    there.

    Attributes:
        epoch: the epoch of the home that the replica knows of; None: it knows of none.
    """

    status = 409
    type = "conflict_error"

    def __init__(self, message: str, *, epoch: int | None = None) -> None:
        super().__init__(message, retry_after_s=1)
        self.epoch = epoch


class Quarantined(BadRequest):
    """The request crashed a replica, or several replicas died while they worked on it. It is rejected for a while."""

    status = 422


OVERLOAD = "overload"
"""Code of a rejection because too many requests or runs are in flight."""


class Overloaded(HttpError):
    """The cluster is overloaded and accepts no more work now. The client may retry later."""

    status = 503
    type = "overloaded_error"


class TooManyRequests(Overloaded):
    """A tenant exceeded one of its limits. The client may retry later."""

    status = 429
    type = "rate_limit_error"


class UpstreamFailed(HttpError):
    """A replica failed while it answered."""

    status = 502
    type = "upstream_error"


class ReplicaLost(UpstreamFailed):
    """The replica died. Another one may answer, or continue the answer.

    Attributes:
        at_work: whether the replica may have worked on the request; False: it was dead before.
        culprit: whether this request crashed the replica; False: the cause is unknown.
    """

    def __init__(self, message: str, *, at_work: bool = True, retry_after_s: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.at_work = at_work
        self.culprit = False
