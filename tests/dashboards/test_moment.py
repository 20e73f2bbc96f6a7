"""`Prometheus.gapless_moment`: a moment up to which every scrape succeeded. A real Prometheus scrapes here."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.offline.dashboards.render import RULES_FILE, scrape_nodes
from tests.dashboards.prometheus_server import Prometheus, PrometheusFailed, needs_prometheus, until

pytestmark = needs_prometheus

RULES = "groups: [{name: one, rules: [{record: 'held:twice', expr: 2 * caesura_held_programs}]}]"
PAGE = "caesura_held_programs 3\n"
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
    served = Target()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(served.status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(served.page.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield served
        server.shutdown()
        thread.join()


def scraper(target: Target) -> Prometheus:
    scrape = scrape_nodes([target.address], interval="200ms")
    return Prometheus({"prometheus.yml": scrape, RULES_FILE: RULES})


@pytest.fixture
def prometheus(target: Target) -> Iterator[Prometheus]:
    with scraper(target) as started:
        yield started


def moment(prometheus: Prometheus, within_s: float = ENOUGH_S) -> float:
    return prometheus.gapless_moment(OVER_S, within_s)


def until_up_is(prometheus: Prometheus, value: float) -> None:
    until(lambda: [one.value for one in prometheus.query("up")] == [value], ENOUGH_S, f"up is {value:g}")


def test_answers_as_of_the_moment_do_not_depend_on_later_scrapes(prometheus: Prometheus, target: Target) -> None:
    until(lambda: prometheus.query("held:twice"), ENOUGH_S, "the rule has a value")
    at_s = moment(prometheus)
    target.status = 503
    until_up_is(prometheus, 0.0)
    assert prometheus.query("caesura_held_programs") == []
    assert [one.value for one in prometheus.query("caesura_held_programs", at_s)] == [3.0]
    assert [one.value for one in prometheus.query("held:twice", at_s)] == [6.0]


def test_the_window_before_the_moment_has_no_failed_scrape(prometheus: Prometheus, target: Target) -> None:
    moment(prometheus)
    target.status = 503
    until_up_is(prometheus, 0.0)
    [failed] = prometheus.query("timestamp(up)")
    target.status = 200
    until_up_is(prometheus, 1.0)
    assert moment(prometheus) > failed.value + OVER_S / 2


def test_where_scrapes_keep_failing_there_is_none(target: Target) -> None:
    target.status = 503
    with scraper(target) as prometheus, pytest.raises(PrometheusFailed, match="within 3 s"):
        moment(prometheus, NEVER_S)
