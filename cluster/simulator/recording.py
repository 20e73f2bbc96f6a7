"""What a simulated run leaves for its record: memory over time, and the schedulers' stories of the programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from cluster.bench.result import Memory
from cluster.bench.story import Story
from cluster.clock import ManualClock
from cluster.goodput import ProgramRecord
from cluster.program import ProgramIdentity
from replicas.kv_use import KvUse
from replicas.scheduler import AgentScheduler
from replicas.virtual_replica import VirtualReplica

SAMPLES = 600
"""Looks at the memory of one run: more than a plot has points."""


@dataclass(slots=True)
class MemoryWatch:
    """Looks at all replicas now and then. It plans nothing itself, so that a watched simulation is the same."""

    replicas: Sequence[VirtualReplica]
    clock: ManualClock
    every_s: float
    seen: list[Memory] = field(default_factory=list)
    _next_s: float = 0.0

    def __call__(self) -> None:
        """Something has happened: look, if it is time to."""
        now_s = self.clock.now_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self.every_s
        self.seen.append(memory_of(self.replicas, now_s))


def memory_of(replicas: Sequence[VirtualReplica], now_s: float) -> Memory:
    """Of all replicas together."""
    running = held = cached = empty = host = 0
    for replica in replicas:
        use, size = KvUse.of(replica.engine.scheduler), replica.engine.shape.block_size
        running += use.running * size
        held += use.held * size
        cached += use.cached * size
        empty += use.empty * size
        if isinstance(replica.engine.scheduler, AgentScheduler):
            host += replica.engine.scheduler.swapping.used_tokens
    return Memory(now_s, running, held, cached, empty, host)


def stories_of(replicas: Sequence[VirtualReplica], programs: Sequence[ProgramRecord]) -> list[Story]:
    """Of each program, what the replicas that had it know; stock vLLM knows nothing."""
    return [_story(replicas, program) for program in programs]


def _story(replicas: Sequence[VirtualReplica], program: ProgramRecord) -> Story:
    key = str(ProgramIdentity(program.program_id).key)
    schedulers = [r.engine.scheduler for r in replicas if isinstance(r.engine.scheduler, AgentScheduler)]
    told = [found for scheduler in schedulers if (found := scheduler.programs.story(key)) is not None]
    if len(told) == 1:
        return Story.of(told[0])
    turns = sorted(chain.from_iterable(each["turns"] for each in told), key=lambda turn: turn["arrived_s"])
    # Each replica's events make a story of their own: what one let go, another cannot hold.
    pauses = chain.from_iterable(Story.of(each).pauses for each in told)
    merged = Story.of({"turns": turns})
    return Story(merged.arrivals_s, merged.waits_s, merged.decisions, tuple(sorted(pauses, key=lambda p: p.from_s)))
