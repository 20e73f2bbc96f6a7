"""`caesura top --once` and `caesura status` against servers over real HTTP: ours, closed ones, and strangers."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from scripted_looks import look

from cluster.cli import main

METRICS = """# TYPE caesura_programs_total counter
caesura_programs_total{model="tiny",tenant="default"} 4.0
# TYPE caesura_ttft_seconds histogram
caesura_ttft_seconds_bucket{le="+Inf"} 3
caesura_ttft_seconds_count 3
caesura_ttft_seconds_sum 1
"""


class Site:
    """Answers with what it was given: a status and a body by path; 404 for others."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = site.answers.get(self.path.split("?")[0], (404, '{"error": {"message": "nothing"}}'))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    told: dict[str, Any] = dict(look().told)
    paths = {"health": "/health", "ready": "/ready", "version": "/version", "models": "/v1/models"}
    paths |= {"programs": "/v1/programs"} | {n: f"/admin/{n}" for n in ("statistics", "router", "predictor")}
    site.answers = {path: (200, json.dumps(told[name])) for name, path in paths.items()}
    site.answers["/metrics"] = (200, METRICS)
    yield site
    site.close()


def caesura(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["caesura", *arguments])
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_one_frame(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert caesura(monkeypatch, "top", "--once", "--interval", "0.1", "--url", f"{site.url}/") == 0
    shown = capsys.readouterr().out
    assert "ready  tiny  policy caesura" in shown
    assert "replica-a" in shown and "█" in shown
    # Of the metrics only the programs offered are told, and there were none between the two looks.
    assert "- programs/s (-; 0 offered)" in shown


def test_status_for_people_and_scripts(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caesura(monkeypatch, "status", "--url", site.url) == 0
    assert "caesura 0.1.0" in capsys.readouterr().out
    assert caesura(monkeypatch, "status", "--url", site.url, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True and told["url"] == site.url
    site.answers["/ready"] = (503, '{"error": {"message": "no model answers"}}')
    assert caesura(monkeypatch, "status", "--url", site.url, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert {"name": "ingress", "state": "trouble", "detail": "no model answers"} in told["parts"]


@pytest.mark.parametrize("command", [("top", "--once"), ("status",)])
@pytest.mark.parametrize("trouble", ["nobody", "scheme", "stranger", "old", "key"])
def test_bad_input_is_one_line(
    command: tuple[str, ...],
    trouble: str,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = {"nobody": "http://127.0.0.1:1", "scheme": "gopher://x"}.get(trouble, site.url)
    if trouble == "stranger":
        site.answers = {"/health": (200, "<html>")}
    if trouble == "old":
        site.answers = {"/health": (200, "{}"), "/version": (200, '{"version": "0.29.0"}')}
    if trouble == "key":
        refused = (401, '{"error": {"message": "no key"}}')
        site.answers |= dict.fromkeys(("/v1/models", "/v1/programs", "/version", "/admin/statistics"), refused)
    assert caesura(monkeypatch, *command, "--url", url) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{url}: ")
    assert trouble != "key" or "CAESURA_API_KEY" in line


def test_broken_metrics_are_no_reason_to_show_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.answers["/metrics"] = (200, "caesura_programs_total{ 3\n}}}")
    assert caesura(monkeypatch, "top", "--once", "--interval", "0.1", "--url", site.url) == 0
    assert "replica-a" in capsys.readouterr().out
