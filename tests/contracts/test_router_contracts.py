"""Every private name of Ray Serve 2.60.0 that our routers use still is what it was."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private import router as rays_router
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest, RequestRoutingContext
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.config import RequestRouterConfig

from cluster.core.registry import ROUTERS
from router.pinned_router import PinnedRequestRouter
from router.prefix_affinity import PrefixAffinityRouter


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_every_registered_router_is_one_of_rays() -> None:
    for name in ROUTERS:
        assert issubclass(ROUTERS.load(name), RequestRouter), name


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_comes_to_a_process_by_value(name: str) -> None:
    sent = RequestRouterConfig(request_router_class=ROUTERS.load(name))
    come = sent.get_request_router_class()
    assert come.__name__ == ROUTERS.load(name).__name__ and issubclass(come, RequestRouter)


ELSEWHERE = """
import sys
from ray import cloudpickle
come = cloudpickle.loads(sys.stdin.buffer.read())
from cluster.core.errors import ReplicaGone
from router import pinned_router, snapshots
assert come is not pinned_router.PinnedRequestRouter, "by reference: no need to take care"
assert come._publish.__globals__["snapshots"].HUB is snapshots.HUB
assert type(come._with_room.__globals__["_gone"]("r")) is ReplicaGone
"""


def test_our_router_that_came_by_value_finds_the_hub_and_the_errors_of_its_process() -> None:
    packed = RequestRouterConfig(request_router_class=PinnedRequestRouter).get_serialized_request_router_cls()
    subprocess.run([sys.executable, "-c", ELSEWHERE], input=packed, check=True, cwd=Path(__file__).parents[2])


def test_what_we_override_is_there_and_called_as_we_take_it() -> None:
    for name, taken in {
        "choose_replicas": ["self", "candidate_replicas", "pending_request"],
        "_choose_replica_for_request": ["self", "pending_request", "is_retry"],
        "create_replica_wrapper": ["self", "replica_info"],
        "update_replicas": ["self", "replicas"],
        "on_replica_actor_died": ["self", "replica_id"],
        "decrement_queue_len_cache": ["self", "replica_id"],
    }.items():
        assert parameters(getattr(RequestRouter, name)) == taken, name
        assert parameters(getattr(PinnedRequestRouter, name)) == taken, name
    assert "def __init__" in source(PinnedRequestRouter)


def test_no_method_of_ours_hides_one_of_rays_by_chance() -> None:
    ours = {name for name, value in vars(PinnedRequestRouter).items() if callable(value)}
    overridden = {
        "__init__",
        "choose_replicas",
        "_choose_replica_for_request",
        "create_replica_wrapper",
        "update_replicas",
        "on_replica_actor_died",
        "decrement_queue_len_cache",
    }
    assert {name for name in ours if hasattr(RequestRouter, name)} == overridden


def test_what_we_call_of_rays_router() -> None:
    assert parameters(RequestRouter._select_from_candidate_replicas) == ["self", "candidates", "backoff_index"]
    assert parameters(RequestRouter._compute_backoff_s) == ["self", "attempt"]
    assert parameters(RequestRouter._record_queue_wait_time) == ["self", "pending_request"]
    for attribute in ("self._deployment_id =", "self._replicas: ", "self._replica_queue_len_cache ="):
        assert attribute in source(RequestRouter.__init__)


def test_a_call_is_chosen_sent_and_counted_without_a_pause_between() -> None:
    """Those who wait for a full replica go one by one: the next must see the call of the one before."""
    sending = source(rays_router.AsyncioRouter._route_and_send_request_once)
    chosen = sending.index("_choose_replica_for_request(")
    counted = sending.index("on_send_request(")
    assert "await" not in sending[chosen:counted]
    assert "decrement_queue_len_cache" in source(rays_router.AsyncioRouter._register_decrement_queue_len_cache_callback)


def test_a_future_that_is_done_ends_rays_loop() -> None:
    assert "if pending_request.future.done():\n                            break" in source(
        RequestRouter._fulfill_pending_requests
    )
    assert "not pending_request.routing_context.should_backoff" in source(RequestRouter._choose_replicas_with_backoff)
    assert "should_backoff" in RequestRoutingContext.__dataclass_fields__
    assert {"args", "metadata", "future", "routing_context"} <= PendingRequest.__dataclass_fields__.keys()
    assert {"session_id", "is_streaming"} <= RequestMetadata.__dataclass_fields__.keys()


def test_rays_router_makes_its_replicas_by_the_method_that_we_override() -> None:
    assert "self.create_replica_wrapper(r)" in source(RequestRouter._update_running_replicas)
    assert "create_replica_wrapper_func=lambda r: RunningReplica(r)" in source(rays_router)
    assert isinstance(RunningReplica.max_ongoing_requests, property)


def test_replicas_have_an_id_and_tell_their_statistics() -> None:
    assert list(ReplicaID.__dataclass_fields__) == ["unique_id", "deployment_id"]
    assert isinstance(RunningReplica.routing_stats, property)
    assert "wrapper.update_replica_info(r)" in source(RequestRouter._update_running_replicas)


def test_rays_prefix_router_reads_requests_where_we_do_it_for_it() -> None:
    assert issubclass(PrefixAffinityRouter, PrefixCacheAffinityRouter)
    assert parameters(PrefixCacheAffinityRouter._extract_text_from_request) == ["self", "pending_request"]
    assert parameters(PrefixCacheAffinityRouter._normalize_prompt_to_string) == ["self", "prompt"]
    assert parameters(PrefixCacheAffinityRouter.on_request_routed) == [
        "self",
        "pending_request",
        "replica_id",
        "result",
    ]
    for method in (PrefixCacheAffinityRouter._prefix_match_best_replicas, PrefixCacheAffinityRouter.on_request_routed):
        assert "self._extract_text_from_request(pending_request)" in source(method)
    assert parameters(PowerOfTwoChoicesRequestRouter.choose_replicas) == [
        "self",
        "candidate_replicas",
        "pending_request",
    ]


def test_our_prefix_router_reads_a_call_of_ours() -> None:
    def text(*args: object) -> str:
        pending = type("Call", (), {"args": args})
        return PrefixAffinityRouter._extract_text_from_request(
            PrefixAffinityRouter.__new__(PrefixAffinityRouter), pending
        )

    assert text("completions", {"prompt": "Once upon"}, {}, None, None) == "Once upon"
    assert text("completions", {"prompt": [1, 22]}, {}, "k", "i") == "1 22"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert text("chat", {"messages": messages}) == "ab"
    assert text({"messages": messages, "model": "tiny"}, {}, "k") == "ab"
    for nothing in ((), ("policy", {}), ("chat", {"messages": None}), ("completions", {"prompt": [["a"]]})):
        assert text(*nothing) in ("", "a")
