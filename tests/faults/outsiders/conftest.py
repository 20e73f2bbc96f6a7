"""One cluster for all tests of this directory; strangers may not hurt it, so nothing is repaired between two tests."""

from collections.abc import Iterator

import httpx
import pytest

from tests.faults.outsiders.guarded import Guarded, guarded_cluster


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """The cluster."""
    with guarded_cluster(tmp_path_factory.mktemp("guarded")) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def acme(guarded: Guarded) -> Iterator[httpx.Client]:
    """A tenant's client."""
    with guarded.client("acme") as client:
        yield client


@pytest.fixture(scope="package")
def other(guarded: Guarded) -> Iterator[httpx.Client]:
    """Another tenant's."""
    with guarded.client("other") as client:
        yield client
