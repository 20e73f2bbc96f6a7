"""`caesura top --once` and `caesura status` against servers over real HTTP: ours, closed ones, and strangers."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.cli import main
from tests.live_view.scripted_looks import look

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
    answer: dict[str, Any] = dict(look().answers)
    paths = {"health": "/health", "ready": "/ready", "version": "/version", "models": "/v1/models"}
    paths |= {"programs": "/v1/programs"} | {n: f"/admin/{n}" for n in ("statistics", "router", "predictor")}
    site.answers = {path: (200, json.dumps(answer[name])) for name, path in paths.items()}
    site.answers["/metrics"] = (200, METRICS)
    yield site
    site.close()


def caesura(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int = 140) -> int:
    monkeypatch.setattr(sys, "argv", ["caesura", *arguments])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_one_frame(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert caesura(monkeypatch, "top", "--once", "--interval", "0.1", "--url", f"{site.url}/") == 0
    shown = capsys.readouterr().out
    assert "ready  tiny  policy caesura" in shown
    assert "replica-a" in shown and "█" in shown
    # Of the metrics only the programs offered are exported, and there were none between the two looks.
    assert "- programs/s (-; 0 offered)" in shown


def test_status_for_people_and_scripts(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caesura(monkeypatch, "status", "--url", site.url) == 0
    assert "caesura 0.1.0" in capsys.readouterr().out
    assert caesura(monkeypatch, "status", "--url", site.url, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True and answer["url"] == site.url
    site.answers["/ready"] = (503, '{"error": {"message": "no model answers"}}')
    assert caesura(monkeypatch, "status", "--url", site.url, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert {"name": "ingress", "state": "trouble", "detail": "no model answers"} in answer["parts"]


def test_tables_are_not_cut_in_a_pipe(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An id or a tool's name that is cut cannot be used in the next command."""
    program, tool, model = f"program-{'p' * 90}", f"mcp__{'t' * 80}", "organisation/a-model-with-a-long-name-123b"
    row = {"id": program, "status": "in_progress", "runs": 2, "model": model, "last_run": "resp_" + "0" * 48}
    spread = {"count": 7, "p50_s": 0.5, "p90_s": 1.0, "p99_s": 2.0}
    durations = [{"name": tool, "run": spread, "queue": None}]
    tools = {"data": [{"name": tool, "owner": "tenant-a", "durations": durations}], "overall": None}
    site.answers |= {"/v1/programs": (200, json.dumps({"data": [row]})), "/v1/tools": (200, json.dumps(tools))}
    assert caesura(monkeypatch, "programs", "list", "--url", site.url, columns=80) == 0
    shown = capsys.readouterr().out
    assert program in shown and model in shown and row["last_run"] in shown and "…" not in shown
    monkeypatch.setenv("CAESURA_URL", site.url)
    assert caesura(monkeypatch, "tools", columns=80) == 0
    shown = capsys.readouterr().out
    assert tool in shown and "0.500  1.000  2.000" in shown and "…" not in shown


def test_the_list_of_programs_shows_sessions_and_how_to_go_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = {"id": "s", "status": "paused", "state": "held", "turns": 3, "cached_share": 0.75, "last_seen_at": 60}
    session |= {"replica": "r1", "runs": 0, "model": "tiny", "last_run": None}
    answer = {"data": [session], "has_more": True, "last_id": "s", "missing_replicas": 1}
    site.answers["/v1/programs"] = (200, json.dumps(answer))
    assert caesura(monkeypatch, "programs", "list", "--url", site.url) == 0
    shown = capsys.readouterr()
    row = next(line for line in shown.out.splitlines() if "paused" in line)
    assert row.replace("│", " ").split() == [
        "s",
        "paused",
        "held",
        "3",
        "75%",
        "1970-01-01",
        "00:01:00",
        "r1",
        "0",
        "tiny",
        "-",
    ]
    assert "--after s" in shown.err and "1 replicas did not answer" in shown.err


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


def test_a_tool_that_cannot_be_used_is_shown_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = {"name": "db__deep", "owner": "db", "unusable": "its parameters are too deep", "durations": []}
    site.answers["/v1/tools"] = (200, json.dumps({"data": [deep], "overall": None}))
    assert caesura(monkeypatch, "tools", "--url", site.url) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "db__deep" in line]
    assert "unusable" in line and "its parameters are too deep" in line
