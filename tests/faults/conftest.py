"""The cluster that most tests here share, and what they measure of promises.

The short form runs with all other tests and judges no times; ``--long`` has the numbers that the promises are made for.
There, a test that misses a time runs once more, and the table says so: a machine that others use is slow at times.
"""

from collections.abc import Iterator

import pytest
from _pytest.runner import runtestprotocol

from tests.faults.promises import Limit, Name, Promised, Promises, Row, missed_times
from tests.faults.stand import Stand, stand
from tests.serving.tool_site import ToolSite

MISSED = pytest.StashKey[dict[Name, float]]()
"""The times that a test missed when it ran first."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Function, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of the long form again if it has missed a time, and report the second run."""
    if not item.config.getoption("--long"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if missed := missed_times(item.user_properties):
        item.stash[MISSED] = missed
        item.user_properties.clear()
        item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
    promises = Promises(is_long, request.node.user_properties, request.node.stash.get(MISSED, {}))

    def measured(fault: str, what: str, measured: float, *, unit: str = "", **limit: float) -> None:
        ((how, value),) = limit.items()
        relation = Limit[how.upper()]
        promises.measured(Row(fault, what, relation, value, measured, unit, request.node.nodeid))

    return measured
