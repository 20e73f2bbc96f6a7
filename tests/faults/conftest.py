"""The table of promises: filled by the tests here, printed at the end.

The short form runs with all other tests and judges no times; ``--long`` has the numbers that the promises are made for.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.promises import Limit, Promised, Promises, Row, table
from tests.faults.stand import Stand, stand
from tests.serving.tool_site import ToolSite

PROMISES: pytest.StashKey[Promises] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PROMISES] = Promises(config.getoption("--long"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    promises = config.stash[PROMISES]
    if promises.rows:
        terminalreporter.write_line("")
        terminalreporter.write_line(table(promises.rows))
    if (path := config.getoption("--promises")) is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(table(promises.rows) + "\n")


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return request.config.stash[PROMISES].is_long


@pytest.fixture(scope="session")
def site() -> Iterator[ToolSite]:
    """The server behind the tools; a test that closes its gate opens it again."""
    site = ToolSite()
    yield site
    site.close()


@pytest.fixture(scope="session")
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
def promised(request: pytest.FixtureRequest) -> Promised:
    """Call it with fault, what, measured and one of ``exactly``, ``at_most``, ``at_least``; ``unit`` says of what."""
    promises = request.config.stash[PROMISES]

    def measured(fault: str, what: str, measured: float, *, unit: str = "", **limit: float) -> None:
        ((how, value),) = limit.items()
        relation = Limit[how.upper()]
        promises.measured(Row(fault, what, relation, value, measured, unit, request.node.nodeid))

    return measured
