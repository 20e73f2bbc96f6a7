"""Virtual replicas for scheduler timelines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import PolicyConfig
from cluster.core.clock import ManualClock
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine, write_config_only_model

MAX_MODEL_LEN = 32768


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model's config.json: all that a scheduler reads of a model."""
    return write_config_only_model(tmp_path_factory.mktemp("config-only-model"), MAX_MODEL_LEN)


Replica = Callable[..., VirtualEngine]


@pytest.fixture
def replica(tiny_config: Path) -> Iterator[Replica]:
    """Makes virtual replicas with a clock that stands still; at the end every block must be accounted for."""
    made: list[VirtualEngine] = []

    def make(
        policy: str = "continuum",
        asynchronous: bool = False,
        num_blocks: int = 64,
        max_num_batched_tokens: int = 2048,
        scheduler_cls: type[AgentScheduler] = AgentScheduler,
        **parameters: Any,
    ) -> VirtualEngine:
        settings = SchedulerSettings(policy=PolicyConfig(name=policy, parameters=parameters))
        shape = Shape(num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens)
        engine = VirtualEngine(scheduler_cls, tiny_config, shape, settings, asynchronous)
        engine.scheduler.clock = ManualClock()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        scheduler = engine.scheduler
        assert isinstance(scheduler, AgentScheduler)
        engine.run()
        scheduler.check_integrity()
        assert scheduler.reset_prefix_cache()
        assert engine.free_blocks() == engine.shape.num_blocks - 1, "a block leaked"
