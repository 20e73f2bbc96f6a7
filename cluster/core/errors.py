"""Every exception that Caesura raises on purpose.

    CaesuraError
    ├── ConfigError            a configuration file, an environment override or a flag       (exit status 2)
    ├── TraceError             a line of a trace file                                        (exit status 2)
    ├── IllegalTransition      an event that a program's lifecycle does not allow; a bug of ours
    ├── IntegrityError         blocks or counts do not add up; a bug of ours
    ├── ControlError           the side channel into a replica's scheduler
    │   ├── ControlTimeout     no answer in time
    │   ├── ControlRefused     the scheduler answered that the request makes no sense
    │   └── EngineGone         the engine is dead and will not answer again
    ├── ReplicaGone            the replica that a call names is not there, or no more
    ├── ToolError              a tool call; the executor makes a result of it
    │   ├── ToolRefused        nothing was run: an unknown tool, bad arguments, a forbidden address, no sandbox
    │   ├── ToolFailed         the tool ran, or was to be reached, and failed
    │   └── ToolUnknown        it may have run: whatever ran it is gone
    ├── RunError               the log of a program's run
    │   ├── RunStoreUnavailable  no answer, or none that helps; a write may have been done
    │   ├── RunUnknown         the store knows no such run, or has forgotten it
    │   ├── RunLeaseLost       another runner has it, or it is closed
    │   ├── RunLogGap          items before the first given one are missing
    │   └── RunOpen            only a closed run can be deleted
    └── HttpError              becomes an OpenAI error body
        ├── BadRequest         400  (also 404, 413, 415, 431 through `status`)
        │   ├── Unauthorized   401  no key, or one that opens nothing
        │   ├── Forbidden      403  the key does not open this
        │   ├── IdempotencyConflict  422  an idempotency key came again with another body
        │   └── Quarantined    422  replicas died under it
        ├── ProgramMoved       409  the program's home is another replica; the ingress goes there
        ├── Overloaded         503  with Retry-After
        │   └── TooManyRequests  429  more than the tenant's share
        └── UpstreamFailed     502  a replica failed while it answered
            └── ReplicaLost    502  ... because it died: another one may answer

Foreign exceptions are mapped at one boundary each: pydantic's in `config` and `validation`, Ray's in `ray_errors`,
Redis's in `store` and `run_store`, vLLM's
in `replicas.requests`, its engine's death in `replicas.control`, those of tools and of the libraries that reach them in
`tools_runtime.kinds`.
"""


class CaesuraError(Exception):
    """The root of all errors raised on purpose."""


class ConfigError(CaesuraError):
    """A configuration value that cannot be used. The message names the file and the key's path."""


class TraceError(CaesuraError):
    """A trace line that cannot be used. The message names the file, the line and the key."""


class IllegalTransition(CaesuraError):
    """An event that the lifecycle does not allow. The message has the program's history; nothing was changed."""


class IntegrityError(CaesuraError):
    """An invariant of something that owns resources is broken."""


class ControlError(CaesuraError):
    """The side channel into a replica's scheduler failed."""


class ControlTimeout(ControlError):
    """The scheduler did not answer in time. Whether it acted is unknown."""


class ControlRefused(ControlError):
    """The scheduler answered that the request makes no sense; nothing was changed."""


class EngineGone(ControlError):
    """The engine behind the side channel is dead."""


class ReplicaGone(CaesuraError):
    """The replica that a call names is not there, or no more; the call reached nobody."""


class ToolError(CaesuraError):
    """A tool call went wrong. The message is read by the model and by the caller."""


class ToolRefused(ToolError):
    """Nothing was run, and nothing would be if the same call came again."""


class ToolFailed(ToolError):
    """The tool failed.

    Attributes:
        transient: the same call may succeed later.
        note: what is known beside what the tool said; it stays where that is cut.
    """

    def __init__(self, message: str, *, transient: bool = False, note: str = "") -> None:
        super().__init__(message)
        self.transient = transient
        self.note = note


class ToolUnknown(ToolError):
    """What ran the tool is gone; whether the tool took effect is unknown."""


class RunError(CaesuraError):
    """The log of a program's run cannot be read or written."""


class RunStoreUnavailable(RunError):
    """The store gave no answer that helps. Whether a write was done is unknown; every write can be repeated.

    Attributes:
        reason: a `cluster.store.StoreFailure`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RunUnknown(RunError):
    """The store knows no such run: there was none, it has expired, or the store has lost its data."""


class RunLeaseLost(RunError):
    """Another runner has the run, or it is closed. Whoever gets this stops working on it; nothing was written."""


class RunLogGap(RunError):
    """Items are missing before the first one that was to be appended: the store has lost some. Nothing was written.

    Attributes:
        expected: the number that the next item must have.
    """

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class RunOpen(RunError):
    """The run is still under way."""


class HttpError(CaesuraError):
    """An error that the HTTP client receives, in OpenAI's error body.

    Attributes:
        status: HTTP status code.
        type: OpenAI error type.
        param: the field of the request that is at fault, if one is.
        code: a machine-readable reason, if there is one.
        retry_after_s: seconds after which a retry makes sense, if one does.
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


class BadRequest(HttpError):
    """The client's request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(BadRequest):
    """No API key, or one that opens nothing."""

    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class Forbidden(BadRequest):
    """The caller's API key does not open this."""

    status = 403
    type = "permission_error"


class IdempotencyConflict(BadRequest):
    """An idempotency key came again with another body."""

    status = 422


class ProgramMoved(HttpError):
    """A turn of a program that has moved away from this replica. The ingress asks where it lives now, and goes there.

    Attributes:
        epoch: the epoch of the home that the replica knows of, if any.
    """

    status = 409
    type = "conflict_error"

    def __init__(self, message: str, *, epoch: int | None = None) -> None:
        super().__init__(message, retry_after_s=1)
        self.epoch = epoch


class Quarantined(BadRequest):
    """A request of which a replica died, or under which several did: it is refused for a while."""

    status = 422


class Overloaded(HttpError):
    """More work than is accepted now; retry later."""

    status = 503
    type = "overloaded_error"


class TooManyRequests(Overloaded):
    """A tenant has more waiting than its share; retry later."""

    status = 429
    type = "rate_limit_error"


class UpstreamFailed(HttpError):
    """A replica failed while it answered."""

    status = 502
    type = "upstream_error"


class ReplicaLost(UpstreamFailed):
    """The replica died. Another one may answer, or go on with the answer.

    Attributes:
        at_work: the replica may have worked on the request; False: it was dead before.
        culprit: it died of this request; False: nobody knows of what.
    """

    def __init__(self, message: str, *, at_work: bool = True, retry_after_s: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.at_work = at_work
        self.culprit = False
