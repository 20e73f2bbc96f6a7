"""The scripts that the chart's pods run."""

import http.server
import json
import runpy
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import CHART

SEAT = runpy.run_path(str(CHART / "files" / "seat.py"))
DRAIN = runpy.run_path(str(CHART / "files" / "drain.py"))
ASK = runpy.run_path(str(CHART / "files" / "ask.py"))


def test_more_seats_are_told_at_once_and_fewer_when_they_stay_fewer() -> None:
    wanted, checks = SEAT["Wanted"](at_least=1, at_most=4), SEAT["LOWER_AFTER"]
    assert [wanted.after(seats) for seats in (2, 3, 9)] == [2, 3, 4]
    assert [wanted.after(3) for _ in range(checks)] == [4] * (checks - 1) + [3]
    # One that moves is away for a while; then it is back, and nothing was told.
    assert [wanted.after(2) for _ in range(checks - 1)] == [3] * (checks - 1)
    assert wanted.after(3) == 3
    assert [wanted.after(2) for _ in range(checks - 1)] == [3] * (checks - 1)
    assert [wanted.after(0) for _ in range(checks)][-1] == 1


def test_what_serves_in_a_pod_is_counted_and_its_node_found(tmp_path: Path) -> None:
    commands = (
        b"ray::ServeReplica:caesura:Ingress.handle_request\0",
        b"ray::SERVE_REPLICA::caesura#ProgramServer:tiny#x3m5c8ae:ServeReplica:caesura:ProgramServer:tiny\0",
        b"ray::ProxyActor.run\0",
        b"ray::IDLE\0",
        b"python\0-m\0x\0ray::ServeReplica\0",
        b"/site-packages/ray/core/src/ray/raylet/raylet\0--object_manager_port=0\0--node_id=12ab\0",
    )
    for number, command in enumerate(commands):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes(command)
    (tmp_path / "9").mkdir()  # it ended while we looked
    (tmp_path / "meminfo").write_text("")
    assert DRAIN["serving"](tmp_path) == 3
    assert DRAIN["node"](tmp_path) == "12ab"
    (tmp_path / "5" / "cmdline").write_bytes(b"")
    assert DRAIN["node"](tmp_path) is None


def test_a_download_leaves_out_what_vllm_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repositories of Llama have all weights twice."""
    files = ["config.json", "model-00001-of-00002.safetensors", "original/consolidated.00.pth", "original/params.json"]
    fetched: dict[str, list[str]] = {}

    def snapshot_download(model: str, revision: str | None, ignore_patterns: list[str] | None = None) -> str:
        fetched[model if revision is None else f"{model} at {revision}"] = [
            file for file in files if not any(fnmatch(file, pattern) for pattern in ignore_patterns or ())
        ]
        return f"/models/{model}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    script = runpy.run_path(str(CHART / "files" / "download.py"))
    script["main"](tmp_path / "done", ["org/a", "org/b@v1", "org/c (no weights)", "org/d@v2 (no weights)"])
    whole, small = files[:2], files[:1]
    assert fetched == {"org/a": whole, "org/b at v1": whole, "org/c": small, "org/d at v2": small}
    assert (tmp_path / "done").exists()


@pytest.fixture
def site() -> Iterator[tuple[str, list[tuple[str, str | None]], dict[str, Any]]]:
    """A URL, the paths that were asked with which key, and the answers."""
    asked: list[tuple[str, str | None]] = []
    answers: dict[str, Any] = {"/ready": {"status": "ready"}}

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked, answers
        server.shutdown()


def test_helm_test_asks_with_its_key_and_fails_without_tokens(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked, answers = site
    monkeypatch.setenv("CAESURA_API_KEY", "csk-1")
    answers["/v1/chat/completions"] = {"usage": {"completion_tokens": 8}}
    ASK["main"](url, "tiny")
    assert asked == [("/ready", None), ("/v1/chat/completions", "Bearer csk-1")]
    answers["/v1/chat/completions"] = {"usage": {"completion_tokens": 0}}
    with pytest.raises(SystemExit, match="no token"):
        ASK["main"](url, "tiny")
