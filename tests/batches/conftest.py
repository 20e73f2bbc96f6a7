"""A real Redis, and ingresses over it."""

from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import pytest
import pytest_asyncio

from cluster.local.embedded_redis import EmbeddedRedis
from tests.batches.batch_site import Ingress

_NUMBERS = count()


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    """One server for a module."""
    with EmbeddedRedis() as server:
        yield server


@pytest_asyncio.fixture
async def ingress(redis: EmbeddedRedis) -> AsyncIterator[Callable[..., Ingress]]:
    """Makes an ingress. They are closed afterwards."""
    made: list[Ingress] = []

    def make(replicas: Any = None, **batches: Any) -> Ingress:
        made.append(Ingress(redis.url, f"ingress-{next(_NUMBERS)}", replicas, **batches))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()
