"""What a run found: the record of every program, policy by policy and block by block."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.bench.settings import BenchSettings
from cluster.bench.story import Story
from cluster.bench.workload import Workload
from cluster.goodput import ProgramRecord


@dataclass(frozen=True, slots=True)
class Memory:
    """What KV memory was used for at a moment, over all replicas. Tokens; a block counts as full."""

    at_s: float
    running: int
    """Of turns."""
    held: int
    """Of paused programs."""
    cached: int
    """Free, but the prefix cache could still use it."""
    empty: int
    host: int = 0
    """Copies in the host tiers."""

    @property
    def capacity(self) -> int:
        """Of all replicas' device memory."""
        return self.running + self.held + self.cached + self.empty


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Every program of one block under one policy."""

    policy: str
    block: int
    warmup: tuple[ProgramRecord, ...]
    """Meant to arrive in the warm-up: accounted for, not measured."""
    measured: tuple[ProgramRecord, ...]
    start_s: float = 0.0
    """When the block began, on the clock of its records."""
    stories: Mapping[str, Story] = field(default_factory=dict)
    """By the program's id, where the server told one."""
    memory: tuple[Memory, ...] = ()
    """Where the run is recorded."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All that a run found."""

    settings: BenchSettings
    model: str
    workload: Workload
    blocks: tuple[BlockResult, ...]
    """In the order in which they ran."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what serves, where it says so."""
