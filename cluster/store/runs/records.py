"""The records that are written to and read from the store of runs.

A run is one execution of a program's request in the cluster. It has a log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.core.errors import IdempotencyConflict


class LogKind(StrEnum):
    """What a store has the logs of. The value is a part of the names of the keys in Redis."""

    RUNS = "runs"
    """Runs of programs: an event of a run is an item of its log."""
    BATCHES = "batches"
    """Batches: a line of a batch is an item of its log."""
    FILES = "files"
    """Files: a piece of the content is an item."""

    @property
    def named(self) -> str:
        """What messages call it."""
        return "programs" if self is LogKind.RUNS else self.value


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The idempotency key of a request that the client may send again."""

    key: str
    """The key, which is unique in its tenant."""
    fingerprint: bytes
    """Fingerprint of the request's body."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be opened."""

    id: str
    """The run's id. It is unique and is never used again."""
    tenant: str
    program: str
    """The program's id, without its tenant."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Short texts by name, which lists of runs contain."""
    idempotency: Idempotency | None = None
    secret: bytes | None = None
    """A secret that is stored outside of the log until the run is closed; None: there is none."""
    status: str = "in_progress"
    """The run's status, which the caller defines."""


@dataclass(frozen=True, slots=True)
class Created:
    """The run is open, and the caller has its lease."""

    run_id: str


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """The idempotency key belongs to another run. Nothing was written."""

    run_id: str
    """The id of the other run."""
    same_body: bool
    """Whether the fingerprints of the two requests' bodies are equal."""

    def of_same_request(self) -> str:
        """Return the id of the other run, which the same request has started.

        Raises:
            IdempotencyConflict: the key was used with another body.
        """
        if not self.same_body:
            raise IdempotencyConflict("the Idempotency-Key was used with another body", param="Idempotency-Key")
        return self.run_id


@dataclass(frozen=True, slots=True)
class RunHead:
    """A run without its log."""

    id: str
    tenant: str
    program: str
    created_s: float
    """Unix time of the creation in seconds, by the store's clock, exact to the microsecond. Later runs of a list have a
    greater value."""
    status: str
    """The status that was written last."""
    labels: Mapping[str, str]
    open: bool
    cancel_asked: bool


@dataclass(frozen=True, slots=True)
class RunLog:
    """A page of a run's log."""

    head: RunHead
    start: int
    """Number of the page's first item."""
    items: tuple[bytes, ...]
    length: int
    """Number of items in the complete log."""

    @property
    def closed(self) -> bool:
        """Whether the run is closed, so that nothing will be appended."""
        return not self.head.open

    @property
    def end(self) -> int:
        """Number of the first item of the next page."""
        return self.start + len(self.items)

    @property
    def more(self) -> bool:
        """Whether the log already has a next page."""
        return self.end < self.length


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of renewing a process's leases. Leases of runs that are not in it are valid for another period."""

    lost: frozenset[str]
    """Runs that another owner has, has closed, or has deleted. This process must stop its work on them. A run that this
    owner itself has closed is in none of these sets."""
    unknown: frozenset[str]
    """Runs that the store has lost. This process must create them again, with all items."""
    cancelled: frozenset[str]
    """Runs that a request asked to cancel. They are in the result of each renewal."""
