"""What all tests share: quiet, offline libraries, and the built-in model."""

import gc
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

# Before vLLM, Ray or a tokenizer is imported: they read their environment once.
os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # One OpenMP thread is five times faster than many on a model this small.
    "OMP_NUM_THREADS": "1",
    # The engine runs in the test's process, and takes 1 GiB for its KV cache unless a test says otherwise.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Ray's processes are as important as the tests that wait for them, and as those of another worker.
    "RAY_worker_niceness": "0",
}

import pytest
from hypothesis import HealthCheck, settings

from replicas.tiny.model import write_tiny_model
from tests.faults.promises import Row, rows_of, table

# How long examples take says nothing on a machine that does other things too. Each run has the same examples, except
# with `--hypothesis-seed`, as in `make fuzz`.
settings.register_profile("new examples", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same examples", settings.get_profile("new examples"), derandomize=True)


PROMISES: list[Row] = []
"""What the tests of this run measured."""
SHARED = ("serving", "outsiders", "faults")
"""Rooms with a cluster that most of their tests share."""
LAST = ("test_replica_failure.py", "test_canaries.py")
"""Files that come last on the cluster of their room: one kills parts of it, the other reads all that it has logged."""
STARTS_ITS_OWN = re.compile(r"^from tests\.serving\.served import .*\bserv(ed|ing)\b|^START_WITHIN_S", re.MULTILINE)
"""In a file of such a room that has nothing to do with the shared cluster."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="tests/faults: for as long, and as many, as is promised")
    parser.addoption("--promises", metavar="FILE", help="tests/faults: write the table of promises there, too")


@cache
def scope_of(file: Path) -> str:
    """The room, for a test that takes the room's cluster; else its file."""
    if file.parent.name not in SHARED:
        return str(file)
    text = file.read_text(encoding="utf-8")
    return file.parent.name if "pytest.mark.cluster" in text and not STARTS_ITS_OWN.search(text) else str(file)


def rank_of(item: pytest.Item) -> tuple[int, bool]:
    """Where a test stands among all.

    Several workers begin with what takes longest. The fixture of a room's cluster ends when a worker goes on to another
    room: files of the room that start their own come before, and no worker has two clusters.
    """
    room = scope_of(item.path)
    if room in SHARED:
        return 2 * SHARED.index(room), item.path.name in LAST
    if item.get_closest_marker("cluster") is not None:
        return 1, False
    return 2 * len(SHARED) + (item.get_closest_marker("engine") is None), False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=rank_of)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("same examples" if config.getoption("--hypothesis-seed") is None else "new examples")


def pytest_collection_finish() -> None:
    """Full collections of garbage need not look at all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries complain of what is never collected


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        PROMISES.extend(rows_of(report.user_properties))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if PROMISES:
        terminalreporter.write_line("")
        terminalreporter.write_line(table(PROMISES))
    if (path := config.getoption("--promises")) is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(table(PROMISES) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers one has the tests of a shared cluster, or of a file: they share what they start.

    Not xdist's own groups: they do not work with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(config.rootpath / nodeid.partition("::")[0])

    return ByCluster(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the built-in model."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory
