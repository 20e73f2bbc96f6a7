"""`/metrics` from real HTTP servers in place of the nodes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from cluster.core.clock import ManualClock
from cluster.observing import catalogue as metrics
from cluster.observing.meter import Meter
from cluster.observing.scrape import ClusterScrape, merged
from tests.observing.recorded import Recorded

SCOPE = 'otel_scope_name="ray._private.telemetry",otel_scope_schema_url="",otel_scope_version=""'


def page(node: str, count: int) -> bytes:
    labels = f'Component="core_worker",NodeAddress="{node}",Version="2.60.0"'
    return f"""# HELP ray_caesura_requests_total Turns that ended, by outcome
# TYPE ray_caesura_requests_total counter
ray_caesura_requests_total{{{labels},model="m",{SCOPE},outcome="ok"}} {count}.0
# HELP ray_caesura_ttft_seconds Seconds
# TYPE ray_caesura_ttft_seconds histogram
ray_caesura_ttft_seconds_bucket{{{labels},le="0.1",model="m",{SCOPE}}} 1.0
ray_caesura_ttft_seconds_bucket{{{labels},le="+Inf",model="m",{SCOPE}}} {count}.0
ray_caesura_ttft_seconds_count{{{labels},model="m",{SCOPE}}} {count}.0
ray_caesura_ttft_seconds_sum{{{labels},model="m",{SCOPE}}} 0.5
# HELP ray_vllm_num_requests_running Running
# TYPE ray_vllm_num_requests_running gauge
ray_vllm_num_requests_running{{{labels},engine="0",{SCOPE}}} 3.0
# HELP ray_serve_something_total Not ours
# TYPE ray_serve_something_total counter
ray_serve_something_total{{{labels}}} 9.0
""".encode()


def families(text: bytes) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """As Prometheus reads it."""
    found: dict[str, list[tuple[str, dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.name not in found, "a family twice"
        found[family.name] = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return found


def test_two_nodes_become_one_exposition() -> None:
    text = merged([page("a", 2), page("b", 5)])
    found = families(text)
    assert set(found) == {"caesura_requests", "caesura_ttft_seconds", "vllm:num_requests_running"}
    assert [(labels["NodeAddress"], value) for _, labels, value in found["caesura_requests"]] == [("a", 2), ("b", 5)]
    assert len(found["caesura_ttft_seconds"]) == 8
    assert text.count(b"# TYPE") == text.count(b"# HELP") == 3
    assert b"otel_scope" not in text
    assert b"ray_" not in text


def test_a_family_that_only_the_second_node_has_is_described() -> None:
    text = merged([b"", page("b", 1)])
    assert text.count(b"# TYPE") == 3


def worker_page(*, gauges: tuple[str, ...], label: str = "WorkerId") -> bytes:
    """Counters and histograms of the processes `old` and `new`, and gauges of some."""
    lines = ["# TYPE ray_vllm_generation_tokens_total counter"]
    lines += [f'ray_vllm_generation_tokens_total{{ReplicaId="r-{one}",{label}="{one}"}} 7.0' for one in ("old", "new")]
    lines += ["# TYPE ray_caesura_ttft_seconds histogram"]
    lines += [f'ray_caesura_ttft_seconds_count{{{label}="{one}",model="m"}} 7.0' for one in ("old", "new")]
    lines += ["# HELP ray_owned_objects Ray's own", "# TYPE ray_owned_objects gauge"]
    lines += [f'ray_owned_objects{{Component="core_worker",{label}="{one}"}} 1.0' for one in gauges]
    lines += ["# TYPE ray_caesura_node_total counter", "ray_caesura_node_total 3.0"]
    return "\n".join(lines).encode()


def workers(text: bytes, label: str = "WorkerId") -> set[str | None]:
    return {labels.get(label) for samples in families(text).values() for _, labels, _ in samples}


def test_the_series_of_a_process_that_has_ended_are_left_out() -> None:
    page_now = worker_page(gauges=("new",))
    assert workers(merged([page_now])) == {"new", None}
    assert workers(merged([worker_page(gauges=("old", "new"))])) == {"old", "new", None}


def test_a_process_of_one_node_is_looked_for_on_its_own_page() -> None:
    assert workers(merged([worker_page(gauges=("new",)), worker_page(gauges=("old",))])) == {"old", "new", None}


def test_nothing_is_left_out_where_ray_does_not_name_processes() -> None:
    assert workers(merged([worker_page(gauges=())])) == {"old", "new", None}
    assert workers(merged([worker_page(gauges=("new",), label="Node")]), "Node") == {"old", "new", None}


Handler = Callable[[web.Request], Awaitable[web.Response]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    """Start a server that answers so; its address."""
    runners: list[web.AppRunner] = []

    async def started(handler: Handler) -> str:
        app = web.Application()
        app.router.add_get("/metrics", handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{runner.addresses[0][1]}"

    yield started
    for runner in runners:
        await runner.cleanup()


async def test_nodes_that_are_gone_slow_or_broken_are_left_out_and_counted(
    serve: Callable[[Handler], Awaitable[str]], monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    monkeypatch.setattr("cluster.observing.scrape.NODE_TIMEOUT_S", 0.3)
    never = asyncio.Event()

    async def fine(_: web.Request) -> web.Response:
        return web.Response(body=page("a", 4))

    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async def slow(_: web.Request) -> web.Response:
        await never.wait()
        raise AssertionError

    nodes = [await serve(fine), await serve(broken), await serve(slow), "127.0.0.1:1"]

    async def listed() -> list[str]:
        return nodes

    scrape = ClusterScrape(ManualClock(), Meter(), listed)
    assert set(recorded.series(metrics.SCRAPE_FAILURES).values()) == {0}
    response = await scrape.response()
    never.set()
    await scrape.aclose()
    found = families(bytes(response.body))
    assert [value for _, _, value in found["caesura_requests"]] == [4]
    assert response.status_code == 200
    assert recorded.of(metrics.SCRAPE_FAILURES) == {("timeout",): 1, ("unreachable",): 1, ("http_status",): 1}
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_a_new_node_is_seen_soon(serve: Callable[[Handler], Awaitable[str]]) -> None:
    async def fine(_: web.Request) -> web.Response:
        return web.Response(body=page("a", 4))

    nodes: list[str] = []

    async def listed() -> list[str]:
        return list(nodes)

    clock = ManualClock()
    scrape = ClusterScrape(clock, Meter(), listed)
    assert "caesura_requests" not in families(bytes((await scrape.response()).body))
    nodes.append(await serve(fine))
    clock.advance(10)
    assert "caesura_requests" in families(bytes((await scrape.response()).body))
    await scrape.aclose()


async def test_a_scrape_that_no_node_answers_has_failed(recorded: Recorded) -> None:
    async def listed() -> list[str]:
        return ["127.0.0.1:1"]

    scrape = ClusterScrape(ManualClock(), Meter(), listed)
    assert (await scrape.response()).status_code == 503
    await scrape.aclose()
    assert recorded.of(metrics.SCRAPE_FAILURES) == {("unreachable",): 1}
