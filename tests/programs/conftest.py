"""A real Redis, and runners over it."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from cluster.local.embedded_redis import EmbeddedRedis
from tests.observing.recorded import Recorded, recording
from tests.programs.runners import Runners


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    """One server for a module."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What is recorded with Ray."""
    return recording(monkeypatch)


@pytest_asyncio.fixture
async def runners(redis: EmbeddedRedis) -> AsyncIterator[Runners]:
    """The maker of a test's runners; they are closed afterwards."""
    made = Runners(redis.url)
    yield made
    for runner in made.made:
        await runner.aclose()
    for store in made.stores:
        await store.close()
