"""Every private name of Ray Serve 2.60.0 that our routers use still is what it was."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.config import RequestRouterConfig

from cluster.core.registry import ROUTERS
from router.pinned_router import PinnedRequestRouter
from router.prefix_affinity import PrefixAffinityRouter


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


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
assert come._choose_replica_for_request.__globals__["ReplicaGone"] is ReplicaGone
"""


def test_our_router_that_came_by_value_finds_the_hub_and_the_errors_of_its_process() -> None:
    packed = RequestRouterConfig(request_router_class=PinnedRequestRouter).get_serialized_request_router_cls()
    subprocess.run([sys.executable, "-c", ELSEWHERE], input=packed, check=True, cwd=Path(__file__).parents[2])


OVERRIDDEN = {
    "choose_replicas": ["self", "candidate_replicas", "pending_request"],
    "_choose_replica_for_request": ["self", "pending_request", "is_retry"],
    "update_replicas": ["self", "replicas"],
    "on_replica_actor_died": ["self", "replica_id"],
}


def test_what_we_override_is_there_and_called_as_we_take_it() -> None:
    for name, taken in OVERRIDDEN.items():
        assert parameters(getattr(RequestRouter, name)) == taken, name
        assert parameters(getattr(PinnedRequestRouter, name)) == taken, name


def test_no_method_of_ours_hides_one_of_rays_by_chance() -> None:
    ours = {name for name, value in vars(PinnedRequestRouter).items() if callable(value)}
    assert {name for name in ours if hasattr(RequestRouter, name)} == OVERRIDDEN.keys()


def test_what_we_call_of_rays_router() -> None:
    """Its attributes: see tests/router/test_pinned_router."""
    assert parameters(RequestRouter._compute_backoff_s) == ["self", "attempt"]
    assert {"args", "metadata"} <= PendingRequest.__dataclass_fields__.keys()
    assert "session_id" in RequestMetadata.__dataclass_fields__


def test_replicas_have_an_id_and_tell_their_statistics() -> None:
    assert list(ReplicaID.__dataclass_fields__) == ["unique_id", "deployment_id"]
    assert isinstance(RunningReplica.routing_stats, property)


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
        assert "_extract_text_from_request" in method.__code__.co_names
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

    assert text({"prompt": "Once upon"}) == "Once upon"
    assert text({"prompt": [1, 22]}) == "1 22"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert text({"messages": messages, "model": "tiny"}) == "ab"
    for nothing in ((), ("policy", {}), ("chat", {"messages": None}), ("completions", {"prompt": [["a"]]})):
        assert text(*nothing) in ("", "a")
