"""The cluster that most tests here share, and what they measure of promises.

The short form runs with all other tests and judges no times; ``--long`` has the numbers that the promises are made for.
"""

from collections.abc import Iterator

import pytest

from tests.faults.promises import Limit, Promised, Promises, Row
from tests.faults.stand import Stand, stand
from tests.serving.tool_site import ToolSite


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="package")
def site() -> Iterator[ToolSite]:
    """The server behind the tools; a test that closes its gate opens it again."""
    site = ToolSite()
    yield site
    site.close()


@pytest.fixture(scope="package")
def shared_stand(tmp_path_factory: pytest.TempPathFactory, site: ToolSite) -> Iterator[Stand]:
    """The cluster that all tests of this directory share; take `whole`."""
    with stand(tmp_path_factory.mktemp("stand"), site) as cluster:
        yield cluster


@pytest.fixture
def whole(shared_stand: Stand) -> Stand:
    """The shared cluster with both replicas at work, whatever the test before did to it."""
    shared_stand.site.gate.set()
    shared_stand.redis.start()
    shared_stand.await_whole()
    return shared_stand


@pytest.fixture
def promised(request: pytest.FixtureRequest, is_long: bool) -> Promised:
    """Call it with fault, what, measured and one of ``exactly``, ``at_most``, ``at_least``; ``unit`` says of what."""
    promises = Promises(is_long, request.node.user_properties)

    def measured(fault: str, what: str, measured: float, *, unit: str = "", **limit: float) -> None:
        ((how, value),) = limit.items()
        relation = Limit[how.upper()]
        promises.measured(Row(fault, what, relation, value, measured, unit, request.node.nodeid))

    return measured
