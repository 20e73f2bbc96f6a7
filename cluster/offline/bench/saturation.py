"""Finds how many programs a second a server serves at most, in a closed loop: each program that ends is replaced."""

import asyncio
from itertools import chain, count
from statistics import fmean
from uuid import uuid4

import numpy as np

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.client import TurnClient, open_session
from cluster.offline.bench.runner import Job, replay
from cluster.offline.bench.server import Server
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import draw


async def saturated_programs_per_s(
    settings: BenchSettings, *, concurrency: int, warmup_s: float, measured_s: float, clock: Clock | None = None
) -> float:
    """Return the programs a second that the server serves while ``concurrency`` programs run at any time.

    The policy is the first one of the settings; the server has its own again at the end. What is counted are turns;
    they are divided by the mean turns of a program, so that a program that has not ended at the end of the measurement
    counts for what was served of it.

    Args:
        settings: the server, the workload and the policies. Its rate, duration and blocks are not used.
        concurrency: programs that run at any time.
        warmup_s: seconds before the measurement.
        measured_s: seconds of the measurement.
        clock: the clock of the times; None: the monotonic clock.

    Raises:
        ConfigError: the server cannot be reached, cannot switch to the policy, or serves no turn.
        TraceError: the trace file cannot be used.
    """
    clock = clock or MonotonicClock()
    pool = settings.load().programs
    url = settings.url.rstrip("/")
    run_id = uuid4().hex[:8]
    async with open_session() as session:
        server = Server(session, url)
        model = await server.first_model() if settings.model is None else settings.model
        before = await server.policy() if settings.policies else None
        if settings.policies:
            await server.switch_policy({"name": settings.policies[0]})
            await server.reset()
        client = TurnClient(session, url, model, clock, settings.turn_timeout_s)
        first_s = clock.now_s() + warmup_s
        end_s = first_s + measured_s

        async def one_after_another(worker: int) -> list[ProgramRecord]:
            seed = (settings.seed, settings.blocks, worker)
            programs = draw(pool, len(pool), np.random.default_rng(seed))
            records: list[ProgramRecord] = []
            for number in count():
                left_s = end_s - clock.now_s()
                if left_s <= 0:
                    break
                program = programs[number % len(programs)]
                job = Job(f"{run_id}-{worker}-{number:05d}", program, 0.0, (*seed, number))
                records += await replay([job], client, clock, left_s, lambda _: None)
            return records

        try:
            records = list(chain.from_iterable(await asyncio.gather(*map(one_after_another, range(concurrency)))))
        finally:
            if before is not None:
                await server.switch_policy(before)
    turns = [turn for record in records for turn in record.turns]
    ends_s = [turn.last_token_s for turn in turns if turn.outcome is Outcome.OK and turn.last_token_s is not None]
    served = sum(first_s <= time_s < end_s for time_s in ends_s)
    if not served:
        error = next((turn.error for turn in turns if turn.error is not None), "no turn ended in time")
        raise ConfigError(f"--url: {url} served no turn: {error}")
    return served / fmean(len(program.turns) for program in pool) / measured_s
