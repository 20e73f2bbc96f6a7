"""Engine processes of tests start from a process that has imported vLLM: imports are most of an engine's start.

As with vLLM's own method, `spawn`, they share nothing with the test's process.
"""

import multiprocessing
from collections.abc import Iterator

import pytest

IMPORTED = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "replicas.control"]


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """For all engines of a module whose conftest imports this, on a CPU."""
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            server = multiprocessing.get_context("forkserver")
            server.set_forkserver_preload(IMPORTED)
            patch.setattr("vllm.v1.engine.utils.get_mp_context", lambda: server)
        yield
