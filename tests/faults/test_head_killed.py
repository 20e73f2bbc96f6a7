"""The head of a Ray cluster whose memory is in Redis is lost, with its controller: what serves goes on."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.ports import free_ports
from tests.faults.agents import STORIES, TURNS, Agents, apart, arguments
from tests.faults.nodes import Nodes, await_ready, gcs_on, nodes, serve_config
from tests.faults.proxy import Service
from tests.faults.stand import PROXY
from tests.faults.under_load import Outcome, ask, background, clients, end_of, lost, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FAULT = "head killed (GCS in Redis)"
RUNS = 6
CPUS = 3.0


@pytest.fixture
def redis(tmp_path: object) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def multi(tmp_path_factory: pytest.TempPathFactory, redis: EmbeddedRedis, is_long: bool) -> Iterator[Nodes]:
    if not is_long:
        pytest.skip("several nodes: with --long")
    with nodes(tmp_path_factory.mktemp("nodes"), (CPUS, CPUS), **gcs_on(redis)) as made:
        yield made


async def test_the_head_is_lost_and_comes_back(
    multi: Nodes, redis: EmbeddedRedis, promised: Callable[..., None]
) -> None:
    (port,) = free_ports(1)
    multi.deploy(serve_config(arguments(redis.url, port), port, replicas=2, proxies="EveryNode"))
    multi.await_running(2)

    def workers_proxies() -> list[int]:
        return [process.pid for node in multi.workers for process in node.named(PROXY)]

    agents = Agents()
    with Service(port, workers_proxies) as service:
        url = f"http://127.0.0.1:{service.port}"
        await_ready(url)
        async with clients(url) as client, agents.at_work(url):
            await agents.have_told_everything()
            assert multi.head is not None
            accepted = [await ask(client, "/v1/responses", {**run(), "background": True}) for _ in range(RUNS)]
            multi.head.kill()
            runs = [asyncio.create_task(end_of(client, one)) for one in accepted]
            runs += [asyncio.create_task(background(client, run())) for _ in range(RUNS)]
            await agents.have_ended(len(agents.ended) + STORIES * TURNS)
            ended = await asyncio.gather(*runs)
            await apart(multi.start_head().await_started)
            await apart(multi.deploy, serve_config(arguments(redis.url, port), port, replicas=2, proxies="EveryNode"))
            await apart(multi.await_running, 2)
            await agents.have_ended(len(agents.ended) + STORIES)
    print([(one.outcome.name, one.status, one.text[:120]) for one in ended])
    agents.promise(FAULT, promised)
    promised(FAULT, "turns that failed", len(agents.failed), exactly=0)
    promised(FAULT, "background programs lost", lost(ended), exactly=0)
    promised(FAULT, "background programs failed", sum(one.outcome is not Outcome.DONE for one in ended), exactly=0)
