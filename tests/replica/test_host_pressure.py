"""The host tier when it is full and evicts all the time, with the real connector and vLLM's own arithmetic of windows.

The second KV cache group has a sliding window. Its blocks may be larger than those of full attention, and with
speculative decoding vLLM keeps some tokens before the window as well.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlidingWindowSpec

from cluster.core.clock import ManualClock
from cluster.core.program import Hints, ProgramIdentity
from replicas import virtual_engine
from replicas.host_tier import kv_transfer_config
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink, stock_transfer_config
from replicas.vllm_versions import COVERS_LOADS

BLOCK, STEP_S, STEPS = 16, 0.02, 600
PROGRAMS, LONGEST, IN_FLIGHT = 12, 900, 12
SHAPES = pytest.mark.parametrize(
    ("window", "window_block", "extra", "host_blocks", "seed"),
    [
        pytest.param(64, 16, 0, 60, 1, id="one-size"),
        pytest.param(64, 32, 0, 60, 1, id="two-sizes"),
        pytest.param(64, 16, 7, 60, 6, id="speculative"),
        pytest.param(64, 16, 20, 40, 7, id="speculative-20"),
        pytest.param(64, 32, 4, 60, 10, id="two-sizes-speculative"),
    ],
)


@pytest.fixture
def sliding(monkeypatch: pytest.MonkeyPatch, window: int, window_block: int, extra: int) -> None:
    """Virtual engines get a second group."""

    def config(num_blocks: int, tensors: Any, groups: list[KVCacheGroupSpec]) -> KVCacheConfig:
        full = groups[0].kv_cache_spec
        spec = SlidingWindowSpec(
            window_block,
            num_kv_heads=1,
            head_size=full.head_size * BLOCK // window_block,
            dtype=torch.float32,
            sliding_window=window,
            extra_retained_tokens=extra,
        )
        size = num_blocks * full.page_size_bytes
        tensor = KVCacheTensor(size, ["layer.0", "layer.1"], size, full.page_size_bytes)
        return KVCacheConfig(num_blocks, [tensor], [groups[0], KVCacheGroupSpec(["layer.1"], spec)])

    monkeypatch.setattr(virtual_engine, "KVCacheConfig", config)


class Pressed:
    """Programs of growing contexts, more of them than device and host have memory for together."""

    def __init__(
        self, scheduler_cls: type[Scheduler], model: Path, host_blocks: int, window_block: int, asynchronous: bool
    ) -> None:
        self.clock = ManualClock()
        self.link = VirtualLink(self.clock, lambda tokens: 2.5 * STEP_S, BLOCK)

        def scheduler(*args: Any, block_size: int) -> Scheduler:
            return scheduler_cls(*args, block_size=max(block_size, window_block), hash_block_size=BLOCK)

        self.engine = VirtualEngine(
            scheduler,  # type: ignore[arg-type]
            model,
            Shape(num_blocks=129, host_blocks=host_blocks),
            None,
            asynchronous,
            self.link,
            kv_transfer_config if scheduler_cls is AgentScheduler else stock_transfer_config,
        )
        self.scheduler = self.engine.scheduler
        if isinstance(self.scheduler, AgentScheduler):
            self.scheduler.clock = self.clock
        self.contexts: dict[str, list[int]] = {}
        self.answered: dict[str, int] = {}

    def run(self, seed: int) -> None:
        numbers = random.Random(seed)
        for turn in arrivals(numbers):
            if turn is not None and len(self.scheduler.requests) < IN_FLIGHT:
                self.arrive(numbers, *turn)
            if self.scheduler.has_requests():
                self.engine.step()
            self.clock.advance(STEP_S)
        for _ in range(STEPS):
            if self.scheduler.has_requests():
                self.engine.step()
            self.clock.advance(STEP_S)

    def arrive(self, numbers: random.Random, program: str, new_tokens: int, output: int) -> None:
        context = self.contexts.get(program, [])
        if len(context) > LONGEST:
            context = []
        self.contexts[program] = context = context + [1000 + numbers.randrange(3000) for _ in range(new_tokens)]
        identity = ProgramIdentity(program_id=program, hints=Hints(expected_tool="ls"))
        self.engine.submit(f"t{len(self.answered)}", context, output, identity)
        self.answered[f"t{len(self.answered)}"] = output


def arrivals(numbers: random.Random) -> Iterator[tuple[str, int, int] | None]:
    for _ in range(STEPS):
        arrives = numbers.random() < 0.4
        turn = f"p{numbers.randrange(PROGRAMS)}", numbers.randrange(5, 120), numbers.randrange(1, 9)
        yield turn if arrives else None


@SHAPES
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_engine_lives_while_the_full_tier_evicts(
    tiny_config: Path, sliding: None, window_block: int, host_blocks: int, seed: int, asynchronous: bool
) -> None:
    pressed = Pressed(AgentScheduler, tiny_config, host_blocks, window_block, asynchronous)
    pressed.run(seed)
    assert not pressed.scheduler.requests, "every turn ends"
    assert len(pressed.answered) > 150
    assert pressed.link.stored_tokens > 5 * host_blocks * BLOCK, "the tier was replaced several times"
    assert pressed.link.loaded_tokens > 0
    pressed.scheduler.check_integrity()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("window", "window_block", "extra", "host_blocks"), [(64, 16, 7, 60)], ids=["speculative"])
def test_vllm_promises_chunks_that_a_load_does_not_find(
    tiny_config: Path, sliding: None, window_block: int, host_blocks: int
) -> None:
    """vllm#54914. When it fails because the pinned vLLM lives, `replicas.vllm_versions.cover_loads` can go."""

    def ends_the_engine(seed: int) -> bool:
        try:
            Pressed(AsyncScheduler, tiny_config, host_blocks, window_block, asynchronous=False).run(seed)
        except AssertionError:
            return True
        return False

    assert any(map(ends_the_engine, range(8))) is not COVERS_LOADS
