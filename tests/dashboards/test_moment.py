"""When a Prometheus can be asked everything: a moment up to which every scrape went well. A real one scrapes here."""

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.clock import MonotonicClock
from cluster.dashboards import scraping
from cluster.proof.moment import gapless_moment
from cluster.proof.prometheus import Prometheus, PrometheusFailed

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)

RULES = "groups: [{name: one, rules: [{record: 'running:twice', expr: 2 * caesura_running}]}]"
PAGE = "caesura_running 3\n"
NODE_LEFT_OUT = 'caesura_scrape_failures{kind="timeout"} 1\n'
OVER_S = 1.0
"""Five scrapes."""
NEVER_S = 3.0
ENOUGH_S = 30.0


@dataclass
class Target:
    """Something that is scraped, and that can fail."""

    address: str = ""
    status: int = 200
    page: str = PAGE


@pytest.fixture
def target() -> Iterator[Target]:
    told = Target()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(told.status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(told.page.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        told.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield told
        server.shutdown()
        thread.join()


def scraper(target: Target) -> Prometheus:
    scrape = scraping.from_nodes([target.address], interval="200ms")
    return Prometheus({"prometheus.yml": scrape, scraping.RULES_FILE: RULES})


@pytest.fixture
def prometheus(target: Target) -> Iterator[Prometheus]:
    with scraper(target) as started:
        yield started


def moment(prometheus: Prometheus, within_s: float = ENOUGH_S) -> float:
    return gapless_moment(prometheus, MonotonicClock(), over_s=OVER_S, within_s=within_s)


def until_up_is(prometheus: Prometheus, value: float) -> None:
    deadline_s = time.monotonic() + ENOUGH_S
    while [one.value for one in prometheus.query("up")] != [value]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_is_asked_as_of_a_moment_does_not_hang_on_the_scrapes_after_it(
    prometheus: Prometheus, target: Target
) -> None:
    at_s = moment(prometheus)
    target.status = 503
    until_up_is(prometheus, 0.0)
    assert prometheus.query("caesura_running") == []
    assert [one.value for one in prometheus.query("caesura_running", at_s)] == [3.0]
    assert [one.value for one in prometheus.query("running:twice", at_s)] == [6.0]


def test_a_failed_scrape_is_none_of_such_a_moments_past(prometheus: Prometheus, target: Target) -> None:
    moment(prometheus)
    target.status = 503
    until_up_is(prometheus, 0.0)
    [failed] = prometheus.query("timestamp(up)")
    target.status = 200
    until_up_is(prometheus, 1.0)
    assert moment(prometheus) > failed.value + OVER_S / 2


@pytest.mark.parametrize(("status", "page"), [(503, PAGE), (200, PAGE + NODE_LEFT_OUT)], ids=["refused", "a node"])
def test_where_scrapes_go_on_failing_there_is_none(target: Target, status: int, page: str) -> None:
    target.status, target.page = status, page
    with scraper(target) as prometheus, pytest.raises(PrometheusFailed, match="within 3 s"):
        moment(prometheus, NEVER_S)
