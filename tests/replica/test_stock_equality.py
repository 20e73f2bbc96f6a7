"""The policy `vllm` schedules exactly what vLLM's own class schedules: every step, every block."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from cluster.config.schema import PolicyConfig
from cluster.core.program import ProgramIdentity
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine

STEPS = 400
SETTINGS = SchedulerSettings(policy=PolicyConfig(name="vllm"))


def what(engine: VirtualEngine) -> tuple[Any, ...]:
    output = engine.step()
    cached = output.scheduled_cached_reqs
    return (
        dict(output.num_scheduled_tokens),
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        list(zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)),
        set(output.preempted_req_ids or ()),
        set(output.finished_req_ids),
        engine.free_blocks(),
    )


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_batches_and_blocks_at_every_step(tiny_config: Path, seed: int, asynchronous: bool) -> None:
    shape = Shape(num_blocks=40, block_size=16, max_num_seqs=6, max_num_batched_tokens=96)
    ours = VirtualEngine(AgentScheduler, tiny_config, shape, SETTINGS, asynchronous)
    stock = VirtualEngine(AsyncScheduler, tiny_config, shape, None, asynchronous)
    rng, contexts, alive = random.Random(seed), {}, []
    preempted = 0
    for number in range(STEPS):
        if rng.random() < 0.35 and len(alive) < 30:
            program = f"p{rng.randrange(8)}"
            prompt = contexts.get(program, [300 + int(program[1:])]) + [
                rng.randrange(2000) for _ in range(rng.randrange(1, 60))
            ]
            prompt, name, length = prompt[-400:], f"r{number}", rng.randrange(1, 40)
            contexts[program] = prompt
            alive.append(name)
            for engine in (ours, stock):
                engine.submit(name, prompt, length, ProgramIdentity(program_id=program))
        if alive and rng.random() < 0.05:
            name = rng.choice(alive)
            for engine in (ours, stock):
                engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        expected = what(stock)
        assert what(ours) == expected, f"step {number}"
        preempted += len(expected[3])
        ours.scheduler.check_integrity()
    assert preempted > 0, "the workload never ran out of memory: it proves too little"
    for engine in (ours, stock):
        engine.run()
        assert engine.free_blocks() == shape.num_blocks - 1
