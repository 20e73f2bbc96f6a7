"""The families that are tested: those of `make test`, or all with ``--long``."""

import pytest

from tests.fork_server import fork_server
from tests.models.families import FAMILIES

__all__ = ["fork_server"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        every = metafunc.config.getoption("--long")
        chosen = [family for family in FAMILIES if every or family.every_run]
        metafunc.parametrize("family", chosen, ids=[family.name for family in chosen], scope="module", indirect=True)
