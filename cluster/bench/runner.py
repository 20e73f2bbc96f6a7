"""One benchmark run: every policy in alternating blocks, so that drift of the machine cancels."""

from dataclasses import replace
from typing import Protocol
from uuid import uuid4

import numpy as np

from cluster.bench.client import TurnClient, open_session
from cluster.bench.memory_watch import watched
from cluster.bench.replay import Job, replay
from cluster.bench.result import BenchResult, BlockResult
from cluster.bench.server import Server, with_waits
from cluster.bench.settings import BenchSettings
from cluster.bench.workload import PlannedProgram, draw
from cluster.clock import Clock, MonotonicClock
from cluster.goodput import ProgramRecord


class BenchProgress(Protocol):
    """Who is told how far a run is."""

    def block(self, policy: str, block: int, programs: int) -> None:
        """A block of ``programs`` programs begins under ``policy``; ``block`` counts from 0."""
        ...

    def ended(self, program: ProgramRecord) -> None:
        """A program of the block ended, one way or another."""
        ...


class Silent:
    """Tells nobody."""

    def block(self, policy: str, block: int, programs: int) -> None:
        """Say nothing."""

    def ended(self, program: ProgramRecord) -> None:
        """Say nothing."""


def policy_order(policies: tuple[str, ...], block: int) -> tuple[str, ...]:
    """Each block begins with the next policy, so that none is always first."""
    first = block % len(policies)
    return policies[first:] + policies[:first]


def plan_block(pool: tuple[PlannedProgram, ...], settings: BenchSettings, block: int) -> list[Job]:
    """The jobs of ``block``: the same for each policy and each run; their ids still need a prefix that is unique."""
    seed = (settings.seed, block)
    rng = np.random.default_rng(seed)
    times_s = settings.process.times_s(rng, count=settings.count, duration_s=settings.duration_s)
    programs = draw(pool, len(times_s), rng)
    return [
        Job(program_id=f"{number:05d}", program=program, arrival_s=time_s, seed=(*seed, number))
        for number, (program, time_s) in enumerate(zip(programs, times_s, strict=True))
    ]


async def run_bench(settings: BenchSettings, progress: BenchProgress, clock: Clock | None = None) -> BenchResult:
    """Replay the workload against the server of ``settings`` and record every program.

    Raises:
        ConfigError: the server cannot be reached, or cannot switch to a policy.
        TraceError: the trace file cannot be used.
    """
    clock = clock or MonotonicClock()
    workload = settings.load()
    url = settings.url.rstrip("/")
    run_id = uuid4().hex[:8]
    results: list[BlockResult] = []
    async with open_session() as session:
        server = Server(session, url)
        model = await server.first_model() if settings.model is None else settings.model
        client = TurnClient(session, url, model, clock, settings.turn_timeout_s)
        for block in range(settings.blocks):
            planned = plan_block(workload.programs, settings, block)
            for policy in policy_order(settings.policy_names, block):
                if settings.policies:
                    await server.switch_policy(policy)
                    await server.reset()
                jobs = [replace(job, program_id=f"{run_id}-{policy}-{block}-{job.program_id}") for job in planned]
                progress.block(policy, block, len(jobs))
                async with watched(server, clock, on=settings.record) as memory:
                    records = await replay(jobs, client, clock, settings.drain_s, progress.ended)
                stories = await server.stories(records)
                records = [with_waits(record, stories.get(record.program_id)) for record in records]
                found = _split(policy, block, records, jobs, settings.warmup_s)
                results.append(replace(found, stories=stories, memory=tuple(memory)))
        versions = await server.versions()
    return BenchResult(settings, model, workload, tuple(results), versions)


def _split(policy: str, block: int, records: list[ProgramRecord], jobs: list[Job], warmup_s: float) -> BlockResult:
    pairs = list(zip(records, jobs, strict=True))
    return BlockResult(
        policy=policy,
        block=block,
        warmup=tuple(record for record, job in pairs if job.arrival_s < warmup_s),
        measured=tuple(record for record, job in pairs if job.arrival_s >= warmup_s),
        start_s=pairs[0][0].arrival_s - pairs[0][1].arrival_s if pairs else 0.0,
    )
