"""Executors on a clock that the test moves, and real servers."""

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.config.tools import ToolModel, ToolsConfig
from cluster.local.cluster import RAY_GAVE_UP, RAY_STARTS
from tests.tools.scripted import SERVERS, ManualTimers, ScriptedKind
from tools_runtime.executor import Entry, ToolExecutor, ToolTable
from tools_runtime.host import ToolHost

CONNECTED_WITHIN_S = 120.0
"""An MCP server in Python imports for a second, or for many beside other work."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine, whose workers find the tests' modules."""
    assert not ray.is_initialized(), "the cluster of another room has not ended"
    environment = {"env_vars": {"PYTHONPATH": str(Path.cwd())}}
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    for left in reversed(range(RAY_STARTS)):
        try:
            ray.init("local", num_cpus=2, namespace="tests", runtime_env=environment, **quiet)
            break
        except Exception as error:
            if not left or RAY_GAVE_UP not in str(error):
                raise
    yield
    ray.shutdown()


@pytest.fixture
def clock() -> ManualTimers:
    """A clock that the test moves."""
    return ManualTimers()


@pytest.fixture
async def executor(clock: ManualTimers) -> AsyncIterator[Callable[..., ToolExecutor]]:
    """Makes an executor of scripted kinds, each with its settings; checks it at the end."""
    made: list[ToolExecutor] = []

    def make(*tools: tuple[ScriptedKind, ToolModel], **options: Any) -> ToolExecutor:
        entries = [Entry.of(kind.tools()[0].offer.name, config, kind) for kind, config in tools]
        made.append(ToolExecutor(ToolTable(entries), clock, **options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()
        assert one.under_way == 0
        one.check_integrity()


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """Starts a script of `servers/`, and waits for the port that it prints; ends it afterwards."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(script: str, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen(
            [sys.executable, str(SERVERS / script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        processes.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
async def open_tools() -> AsyncIterator[Callable[..., Awaitable[ToolHost]]]:
    """Opens real tools by their configuration; closes and checks them at the end."""
    hosts: list[ToolHost] = []

    async def start(defined: dict[str, dict[str, Any]], **said: Any) -> ToolHost:
        patient = {
            name: {"connect_timeout_s": CONNECTED_WITHIN_S, **tool} if tool["kind"] == "mcp" else tool
            for name, tool in defined.items()
        }
        host = ToolHost(ToolsConfig.model_validate({"defined": patient, **said}))
        hosts.append(host)
        await host.open()
        return host

    yield start
    for host in hosts:
        await host.aclose()
        host.executor.check_integrity()
