"""What is written to and read from the store of runs.

A run is one execution of a program's request in the cluster, with a log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A client's key for a request that it may send again."""

    key: str
    """Unique in its tenant."""
    fingerprint: bytes
    """Of the request's body."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that is to be opened."""

    id: str
    """Unique, and never used again."""
    tenant: str
    program: str
    """The program's id, without its tenant."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Small, shown in lists."""
    idempotency: Idempotency | None = None
    secret: bytes | None = None
    """Kept beside the log until the run is closed, and never shown in it."""
    status: str = "in_progress"
    """The caller's word."""


@dataclass(frozen=True, slots=True)
class Created:
    """The run is open, and leased to who asked."""

    run_id: str


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """Its idempotency key belongs to another run; nothing was written."""

    run_id: str
    """That other run."""
    same_body: bool
    """The fingerprints are equal."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """A run without its log."""

    id: str
    tenant: str
    program: str
    created_s: float
    """Unix time by the store's clock, exact to the microsecond; later runs of a list have a greater one."""
    status: str
    """As it was last written."""
    labels: Mapping[str, str]
    open: bool
    cancel_asked: bool


@dataclass(frozen=True, slots=True)
class RunLog:
    """A page of a run's log."""

    head: RunHead
    start: int
    """Number of the first item of the page."""
    items: tuple[bytes, ...]
    length: int
    """Items in the whole log."""

    @property
    def closed(self) -> bool:
        """Nothing will be appended."""
        return not self.head.open

    @property
    def end(self) -> int:
        """Where the next page begins."""
        return self.start + len(self.items)

    @property
    def more(self) -> bool:
        """There is another page already."""
        return self.end < self.length


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the leases of a process; those of all other runs hold for another period."""

    lost: frozenset[str]
    """Another owner has them, or had them and closed them: stop working on them. One that this owner has closed is in
    none of these: its task is about to learn it."""
    unknown: frozenset[str]
    """The store has lost its data: create them again, with all items."""
    cancelled: frozenset[str]
    """A request asked to cancel them; repeated at each renewal."""
