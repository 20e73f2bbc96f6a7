"""A real OTLP/HTTP receiver on loopback, in the tests' process; and the spans that it got, as a tree."""

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class Got:
    """A span. Times are Unix seconds."""

    name: str
    trace: str
    id: str
    parent: str
    part: str
    began_s: float
    ended_s: float
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    links: tuple[tuple[str, str], ...]
    failed: bool


@dataclass
class Receiver:
    """Takes spans at /v1/traces; any other path is a tool, which answers with what it was asked."""

    spans: list[Got] = field(default_factory=list)
    tool_headers: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, conversation: str) -> list[Got]:
        """All spans of the traces in which a span is of this conversation."""
        traces = {s.trace for s in self.spans if s.attributes.get("gen_ai.conversation.id") == conversation}
        return [span for span in self.spans if span.trace in traces]

    def wait_for(self, conversation: str, *names: str, within_s: float = 30.0) -> list[Got]:
        """The same, once as many spans of these names are there."""
        deadline = time.monotonic() + within_s
        while True:
            there = sorted(self.of(conversation), key=lambda span: span.began_s)
            missing = list(names)
            for span in there:
                if span.name in missing:
                    missing.remove(span.name)
            if not missing:
                return there
            assert time.monotonic() < deadline, f"no {missing} among {[span.name for span in there]}"
            time.sleep(0.05)

    def _handler(receiver) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer, kind = b"done", "text/plain"
                if self.path == "/v1/traces":
                    receiver.spans += read(ExportTraceServiceRequest.FromString(body))
                    answer, kind = ExportTraceServiceResponse().SerializeToString(), "application/x-protobuf"
                else:
                    receiver.tool_headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        return Handler


def read(request: ExportTraceServiceRequest) -> list[Got]:
    found = []
    for resource in request.resource_spans:
        part = _plain(resource.resource.attributes)["caesura.part"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                found.append(
                    Got(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        part,
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        _plain(span.attributes),
                        {event.name: _plain(event.attributes) for event in span.events},
                        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                        span.status.code == 2,
                    )
                )
    return found


def tree(spans: list[Got], parent: str = "") -> list[Any]:
    """The spans below a parent, in the order in which they began: names, each with what is below it."""
    return [
        (span.name, tree(spans, span.id)) if tree(spans, span.id) else span.name
        for span in spans
        if span.parent == parent
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
