"""What a run found: the record of every program, policy by policy and block by block."""

from dataclasses import dataclass

from cluster.bench.settings import BenchSettings
from cluster.bench.workload import Workload
from cluster.goodput import ProgramRecord


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Every program of one block under one policy."""

    policy: str
    block: int
    warmup: tuple[ProgramRecord, ...]
    """Meant to arrive in the warm-up: accounted for, not measured."""
    measured: tuple[ProgramRecord, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All that a run found."""

    settings: BenchSettings
    model: str
    workload: Workload
    blocks: tuple[BlockResult, ...]
    """In the order in which they ran."""
