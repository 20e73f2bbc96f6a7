"""Nodes, a new policy, more replicas, fewer, a node that is drained: while agents work, and none of them notices.

A multi-node Ray cluster in processes of this machine; changed as a user changes it: by `serve deploy`, the admin
routes, and the hook that the chart's pods run before they end.
"""

from collections.abc import Callable, Iterator

import httpx
import pytest

from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.ports import free_ports
from tests.faults.agents import CHANGED_WITHIN_S, STORIES, TURNS, Agents, apart, arguments
from tests.faults.nodes import Nodes, await_ready, nodes, serve_config
from tests.faults.stand import Stand, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FAULT = "rolling change under load"
REQUESTS = 2000
CPUS = 3.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def multi(tmp_path_factory: pytest.TempPathFactory, is_long: bool) -> Iterator[Nodes]:
    if not is_long:
        pytest.skip("several nodes: with --long")
    with nodes(tmp_path_factory.mktemp("nodes"), (CPUS, CPUS)) as made:
        yield made


@pytest.fixture(scope="module")
def served(multi: Nodes, redis: EmbeddedRedis) -> str:
    (port,) = free_ports(1)
    multi.deploy(serve_config(arguments(redis.url, port), port, replicas=2))
    multi.await_running(2)
    url = f"http://127.0.0.1:{port}"
    await_ready(url)
    return url


def policies(url: str) -> list[str]:
    """Of each replica; nothing where not all answer."""
    told = httpx.get(f"{url}/admin/policy", timeout=30)
    return [one["name"] for one in told.json()["replicas"]] if told.is_success else []


async def put_policy(url: str, name: str) -> None:
    """As `PUT /admin/policy` does it: at once."""
    answer = await apart(lambda: httpx.put(f"{url}/admin/policy", json={"name": name}, timeout=60))
    answer.raise_for_status()


async def test_the_policy_changes_on_one_node(whole: Stand, promised: Callable[..., None]) -> None:
    agents = Agents()
    async with agents.at_work(whole.url):
        await agents.have_told_everything()
        for name in ("infercept", "vllm", "caesura"):
            await put_policy(whole.url, name)
            assert set(await apart(policies, whole.url)) == {name}
            await agents.have_ended(len(agents.ended) + STORIES)
    agents.promise("policy changed under load", promised)
    promised("policy changed under load", "turns that failed", len(agents.failed), exactly=0)


async def test_policy_and_replicas_change_under_load(
    multi: Nodes, served: str, redis: EmbeddedRedis, promised: Callable[..., None]
) -> None:
    port = int(served.rsplit(":", 1)[1])
    agents = Agents()

    async def policies_are(name: str, replicas: int) -> None:
        await apart(until, lambda: policies(served) == [name] * replicas, f"not {name}", CHANGED_WITHIN_S)

    async with agents.at_work(served):
        await agents.have_told_everything()
        await put_policy(served, "vllm")
        await policies_are("vllm", 2)
        config = arguments(redis.url, port)
        await apart(multi.deploy, serve_config(config, port, replicas=3))
        await apart(multi.await_running, 3)
        # One that has started since begins with the configuration's.
        await apart(
            until, lambda: sorted(policies(served)) == ["continuum", "vllm", "vllm"], "not three", CHANGED_WITHIN_S
        )
        config |= {"policy": {"name": "infercept"}}
        await apart(multi.deploy, serve_config(config, port, replicas=3))
        await apart(multi.await_running, 3)
        await policies_are("infercept", 3)
        await apart(multi.deploy, serve_config(config, port, replicas=2))
        await apart(multi.await_running, 2)
        await agents.have_ended(REQUESTS)
    promised(FAULT, "turns", len(agents.ended), at_least=REQUESTS)
    agents.promise(FAULT, promised)
    promised(FAULT, "turns that failed", len(agents.failed), exactly=0)


async def test_a_node_is_drained_as_its_pod_would_be(multi: Nodes, served: str, promised: Callable[..., None]) -> None:
    agents = Agents()
    node = multi.serving
    async with agents.at_work(served):
        await agents.have_told_everything()
        node.drain()
        await apart(until, lambda: not node.lives, "the node does not end", CHANGED_WITHIN_S)
        await agents.have_ended(len(agents.ended) + STORIES)
    told = node.log.with_suffix(".log.drain").read_text()
    assert "Traceback" not in told, told
    await apart(multi.await_running, 2)
    assert all(address != node.address for _, address in multi.replicas().values())
    await apart(multi.start_worker(CPUS).await_started)
    agents.promise("node drained under load", promised)
    promised("node drained under load", "turns that failed", len(agents.failed), exactly=0)


async def test_a_node_is_lost(multi: Nodes, served: str, promised: Callable[..., None]) -> None:
    await apart(multi.await_running, 2)
    node = multi.serving
    agents = Agents()
    async with agents.at_work(served):
        await agents.have_told_everything()
        before = len(agents.ended)
        node.kill()
        await agents.have_ended(before + STORIES * TURNS)
        await apart(multi.await_running, 2)
    await_ready(served)
    agents.promise("node lost", promised)
    slowest_s = max(one.stall_s for one in agents.ended[before:])
    promised("node lost", "placed anew after", slowest_s, unit="s", at_most=60)
