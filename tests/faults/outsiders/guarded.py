"""A cluster as strangers see it: closed by keys, several tenants, tools with secrets, its log and its traces kept."""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
import yaml

from cluster.local.embedded_redis import EmbeddedRedis
from tests.faults.stand import MARK, marked, title_of
from tests.serving.served import serving

WORKERS = (
    "ServeReplica:",
    "SERVE_REPLICA",
    "EngineCore",
    "ProxyActor",
    "ServeController",
    "ToolActor",
    "raylet",
    "gcs_server",
)

SECRET = uuid.uuid4().hex
"""In everything that is a secret here, so that one search finds any of them."""
KEYS = {name: f"csk-{name}-{SECRET}" for name in ("acme", "other", "noisy", "ops")}
TOOL_SECRET = f"Bearer tool-{SECRET}"

CONTEXT_TOKENS = 4096
MAX_IN_FLIGHT = 32
OF_THE_NOISY, OF_THE_NOISY_PER_S = 4, 20
"""Turns at a time and in a second that it is allowed: half of what fills the engine's steps, and about a quarter of
what this cluster answers with clients beside it on two cores. Four turns at a time alone are three quarters of that."""
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
BOOKING: dict[str, Any] = {
    "type": "object",
    "properties": {"seats": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["seats"],
    "additionalProperties": False,
}


class Sink:
    """A server that keeps what it is sent: tool calls, spans. /fail answers 500 and repeats nothing."""

    def __init__(self) -> None:
        self.received: dict[str, list[bytes]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(sink) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                sink.received.setdefault(self.path, []).append(body)
                self.send_response(500 if self.path == "/fail" else 200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

        return Handler


@dataclass(frozen=True)
class Guarded:
    """A cluster that serves.

    Attributes:
        url: of its HTTP surface.
        log: everything that `caesura serve` prints.
        redis: its store.
        sink: where its tools' calls and its traces go.
        mark: in the environment of each of its processes.
    """

    url: str
    log: Path
    redis: EmbeddedRedis
    sink: Sink
    mark: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def family(self) -> list[psutil.Process]:
        """Every process of it that lives now; Redis is not among them."""
        return marked(self.mark)

    def workers(self) -> dict[int, str]:
        """Those that must not die: pid to what they are."""
        titles = {process.pid: _program_of(process) for process in self.family}
        return {
            pid: next(part for part in WORKERS if part in title)
            for pid, title in titles.items()
            if any(part in title for part in WORKERS)
        }

    def session(self) -> Path:
        """Where Ray keeps this cluster's logs."""
        raylet = next(process for process in self.family if "raylet" in _program_of(process))
        found = re.search(r"/tmp/ray/session_[^/ ]+", " ".join(raylet.cmdline()))
        assert found is not None
        return Path(found.group())

    def logs(self) -> dict[str, str]:
        """Every file of its Ray session, and what `caesura serve` printed."""
        files = [path for path in self.session().rglob("*") if path.is_file() and "/sockets/" not in str(path)]
        return {str(path): path.read_text(errors="replace") for path in (*files, self.log)}

    def client(self, key: str | None, **said: Any) -> httpx.Client:
        headers = {} if key is None else bearer(key)
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0, **said)


def _program_of(process: psutil.Process) -> str:
    """What it is, without its options: these name other processes."""
    return title_of(process).partition(" --")[0]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[key]}"}


def config_of(directory: Path, redis: EmbeddedRedis, sink: Sink) -> dict[str, Any]:
    keys = [
        {"tenant": "acme", "key": KEYS["acme"]},
        {"tenant": "other", "key": KEYS["other"]},
        {"tenant": "noisy", "key": KEYS["noisy"]},
        {"tenant": "ops", "key": KEYS["ops"], "roles": ["admin", "metrics", "serve"]},
    ]
    (directory / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    tool = {"kind": "http", "method": "POST", "private_addresses": True, "idempotent": False}
    secret = {"headers_from_environment": {"Authorization": "CANARY_TOOL_KEY"}}
    return {
        "http": {"port": 0, "max_concurrent_requests": MAX_IN_FLIGHT, "max_body_bytes": 1 << 20},
        "replicas": {"count": 1, "kv_cache_bytes": 32 << 20},
        "engine": {"max_model_len": CONTEXT_TOKENS, "max_num_seqs": 32},
        "redis": {"url": redis.url, "refresh_s": 0.2},
        "auth": {"file": str(directory / "keys.yaml")},
        "tenants": {
            "noisy": {"max_concurrent": OF_THE_NOISY, "requests_per_s": OF_THE_NOISY_PER_S, "burst": OF_THE_NOISY}
        },
        "logs": {"format": "json"},
        "tracing": {"otlp_endpoint": f"{sink.url}/v1/traces"},
        "tools": {
            "request_kinds": ["mcp", "http"],
            "defined": {
                "book": {**tool, **secret, "url": f"{sink.url}/book", "parameters": BOOKING},
                "fail": {**tool, **secret, "url": f"{sink.url}/fail", "parameters": NOTHING},
                "nobody": {**tool, **secret, "url": "http://127.0.0.1:9/", "parameters": NOTHING},
            },
        },
    }


@contextmanager
def guarded_cluster(directory: Path) -> Iterator[Guarded]:
    """It, and afterwards nothing of it is left."""
    sink, mark, log = Sink(), uuid.uuid4().hex, directory / "serve.log"
    with EmbeddedRedis() as redis:
        file = directory / "caesura.yaml"
        file.write_text(yaml.safe_dump(config_of(directory, redis, sink)))
        try:
            said = {MARK: mark, "CANARY_TOOL_KEY": TOOL_SECRET, "VLLM_LOGGING_LEVEL": "INFO"}  # its default
            with serving(file, log=log, **said) as cluster:
                yield Guarded(cluster.url, log, redis, sink, mark)
        finally:
            for left in marked(mark):
                left.kill()
            sink.close()
