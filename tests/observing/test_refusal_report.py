"""What `caesura serve` prints of refused requests, from pages that a real HTTP server has."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.core.clock import ManualClock
from cluster.local.refusals import PERIOD_S, RefusalReport

CHAT = "/v1/chat/completions"


def page(*refusals: tuple[str, str, str, str, float]) -> str:
    """Each: worker, route, status, code, count."""
    lines = ["# TYPE ray_owned_objects gauge"]
    lines += [f'ray_owned_objects{{WorkerId="{one[0]}"}} 1.0' for one in refusals]
    lines += ["# TYPE ray_caesura_http_refusals_total counter"]
    for worker, route, status, code, count in refusals:
        labels = f'WorkerId="{worker}",code="{code}",route="{route}",status="{status}"'
        lines.append(f"ray_caesura_http_refusals_total{{{labels}}} {count}")
    return "\n".join(lines)


class Node:
    """A node's agent with a page that changes."""

    def __init__(self) -> None:
        self.text = page()
        self.status = 200
        self.reads = 0
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                node.reads += 1
                self.send_response(node.status)
                self.end_headers()
                self.wfile.write(node.text.encode())

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_each_kind_of_new_refusals_has_a_line(node: Node) -> None:
    clock = ManualClock()
    report = RefusalReport(clock, lambda: [node.address])

    def later(*refusals: tuple[str, str, str, str, float]) -> list[str]:
        node.text = page(*refusals)
        clock.advance(PERIOD_S)
        return report.lines()

    assert later() == []
    long = ("a", CHAT, "400", "context_length_exceeded")
    assert later((*long, 2.0), ("a", "none", "401", "invalid_api_key", 1.0)) == [
        f"refused 2 requests to {CHAT}: 400 context_length_exceeded",
        "refused 1 request before the routing: 401 invalid_api_key",
    ]
    assert later((*long, 2.0)) == []
    # Another ingress has refused one; the first has ended.
    assert later(("b", CHAT, "400", "context_length_exceeded", 1.0)) == [
        f"refused 1 request to {CHAT}: 400 context_length_exceeded"
    ]


def test_the_metrics_are_read_at_intervals(node: Node) -> None:
    clock = ManualClock()
    report = RefusalReport(clock, lambda: [node.address])
    for _ in range(21):
        clock.advance(PERIOD_S / 10)
        report.lines()
    assert node.reads == 2


def test_what_a_node_does_not_answer_is_reported_later(node: Node) -> None:
    clock = ManualClock()
    report = RefusalReport(clock, lambda: ["127.0.0.1:1", node.address])
    node.text, node.status = page(("a", CHAT, "503", "overload", 3.0)), 500
    clock.advance(PERIOD_S)
    assert report.lines() == []
    node.status = 200
    clock.advance(PERIOD_S)
    assert report.lines() == [f"refused 3 requests to {CHAT}: 503 overload"]
