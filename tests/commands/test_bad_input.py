"""What commands say where an output cannot be written, or where a server refuses a request: one line, no traceback."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from cluster.offline.commands._common import Refused, send
from tests.words.test_config import run_main

COMMANDS = [
    ("dashboards", "render"),
    ("demo",),
    ("predictor", "export", "--store", "unix:///nobody"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_folder_that_cannot_be_written_is_named(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_main(monkeypatch, *command, "--out", str(tmp_path / "file" / "out")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("--out: ") and str(tmp_path / "file") in line


def answering(monkeypatch: pytest.MonkeyPatch, status: int, **body: Any) -> None:
    monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(status, **body))


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, {"json": {"error": {"message": "no such tool"}}}, "no such tool"),
        (404, {"json": {"error": "not found"}}, "HTTP 404"),
        (404, {"json": {"error": {}}}, "HTTP 404"),
        (500, {"json": []}, "HTTP 500"),
        (502, {"text": "<html>"}, "HTTP 502"),
    ],
)
def test_an_error_of_any_server_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, body: Any, reason: str
) -> None:
    answering(monkeypatch, status, **body)
    with pytest.raises(typer.Exit) as ended:
        send("GET", "http://server", "/v1/tools")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == f"http://server: {reason}\n"


def test_an_error_that_a_command_expects_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, 409, json={"error": {"message": "it goes on"}})
    with pytest.raises(Refused) as refused:
        send("DELETE", "http://server", "/v1/tools", expected=(404, 409))
    assert (refused.value.status, capsys.readouterr().err) == (409, "")
