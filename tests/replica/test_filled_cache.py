"""A virtual engine's prefix cache, filled with what was never computed there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import Shape, VirtualEngine, chained_hashes

PROMPT = list(range(100))


@pytest.fixture
def engine(tiny_config: Path) -> Callable[..., VirtualEngine]:
    return lambda **shape: VirtualEngine(AsyncScheduler, tiny_config, Shape(**shape))


@pytest.mark.parametrize(("tokens", "cached"), [(0, 0), (15, 0), (40, 32), (96, 96), (100, 96), (999, 96)])
def test_whole_blocks_of_it_are_cached_and_belong_to_nobody(
    engine: Callable[..., VirtualEngine], tokens: int, cached: int
) -> None:
    filled = engine()
    filled.fill_cache(PROMPT, tokens)
    filled.fill_cache(PROMPT, tokens)
    assert filled.cached_blocks(chained_hashes(PROMPT, 16)) == cached // 16
    assert filled.free_blocks() == filled.shape.num_blocks - 1
    filled.submit("a", [*PROMPT, 7], 1)
    assert filled.step().num_scheduled_tokens == {"a": len(PROMPT) + 1 - cached}


def test_no_more_than_memory_takes_and_nothing_without_a_cache(engine: Callable[..., VirtualEngine]) -> None:
    small = engine(num_blocks=4)
    small.fill_cache(PROMPT, 100)
    assert small.cached_blocks(chained_hashes(PROMPT, 16)) == 3
    with pytest.raises(ValueError, match="prefix cache"):
        engine(prefix_caching=False).fill_cache(PROMPT, 100)


def test_a_forgetful_pool_keeps_what_is_in_use_and_forgets_what_is_free(
    engine: Callable[..., VirtualEngine],
) -> None:
    hashes = chained_hashes(PROMPT, 16)
    for forgetful, left in ((False, 6), (True, 0)):
        pool = engine(forgetful=forgetful)
        pool.submit("a", PROMPT, 2)
        pool.step()
        assert pool.cached_blocks(hashes) == 6
        pool.run()
        assert pool.cached_blocks(hashes) == left
        assert pool.free_blocks() == pool.shape.num_blocks - 1


def test_policies_know_that_there_is_no_prefix_cache(tiny_config: Path) -> None:
    for shape, cached in ((Shape(), True), (Shape(forgetful=True), False), (Shape(prefix_caching=False), False)):
        scheduler = VirtualEngine(AgentScheduler, tiny_config, shape).scheduler
        assert isinstance(scheduler, AgentScheduler)
        assert scheduler.load_now().facts.prefix_cache == cached
