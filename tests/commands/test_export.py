"""`caesura programs export`, against a server that a test makes up."""

import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from pyarrow.parquet import read_table
from typer.testing import CliRunner

from cluster.cli import app
from cluster.offline.commands import records
from cluster.offline.commands._common import Refused

ANSWER = {
    "index": 0,
    "token_ids": [4, 5],
    "logprobs": [-0.5, -1.25],
    "finish_reason": "stop",
    "stop_reason": 2,
    "weights": [{"version": "step-1", "from": 0}],
}


def turn(program: str, number: int, *answers: dict[str, Any]) -> dict[str, Any]:
    status = "completed" if answers else "incomplete"
    return {
        "object": "program.turn",
        "program": program,
        "parent": "task-1",
        "turn": number,
        "request": f"r{number}",
        "method": "chat",
        "model": "tiny",
        "began_at": 1.5,
        "ended_at": 2.5 if answers else None,
        "status": status,
        "prompt_token_ids": [1, 2, 3] if answers else None,
        "answers": list(answers),
    }


class Server:
    """The recorded programs, in pages of one, what was deleted, and the requests that it refuses."""

    def __init__(self) -> None:
        self.programs = {
            "a": [turn("a", 1, ANSWER), turn("a", 2, ANSWER, {**ANSWER, "index": 1})],
            "b/c": [turn("b/c", 1, ANSWER), turn("b/c", 2)],
        }
        self.deleted: list[tuple[str, Any]] = []
        self.refusals: dict[tuple[str, str], int] = {}
        """Statuses by method and program."""

    def send(
        self,
        method: str,
        url: str,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        expected: Container[int] = (),
    ) -> dict[str, Any]:
        parameters = parameters or {}
        name = path.removeprefix("/v1/programs/").removesuffix("/tokens")
        if (status := self.refusals.get((method, name))) is not None:
            raise Refused(status) if status in expected else typer.Exit(1)
        if method == "DELETE":
            self.deleted.append((path, parameters))
            return {}
        if path == "/v1/records":
            names = [one for one in self.programs if one > parameters.get("after", "")]
            return {"data": [{"id": one} for one in names[:1]], "has_more": len(names) > 1, "last_id": names[0]}
        turns = [one for one in self.programs[name] if one["turn"] > parameters["after"]]
        return {"data": turns[:1], "has_more": len(turns) > 1, "last_turn": turns[0]["turn"]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(records, "send", made.send)
    return made


def export(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["programs", "export", *arguments])


def test_all_programs_as_json_lines(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    done = export("--output", str(file), "--delete")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["program"], row["turn"], row["answer"], row["status"]) for row in rows] == [
        ("a", 1, 0, "completed"),
        ("a", 2, 0, "completed"),
        ("a", 2, 1, "completed"),
        ("b/c", 1, 0, "completed"),
        ("b/c", 2, None, "incomplete"),
    ]
    assert rows[0] == {
        **{key: value for key, value in turn("a", 1, ANSWER).items() if key not in ("object", "answers")},
        "answer": 0,
        **{key: value for key, value in ANSWER.items() if key != "index"},
    }
    assert server.deleted == [("/v1/programs/a/tokens", {"last_turn": 2})], "b/c has a turn without tokens"
    assert "1 turns have no tokens" in done.stderr


def test_a_listed_program_that_is_gone_is_left_out(server: Server, tmp_path: Path) -> None:
    server.refusals["GET", "a"] = 404
    file = tmp_path / "out.jsonl"
    done = export("--output", str(file))
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["program"] for line in file.read_text().splitlines()] == ["b/c", "b/c"]
    assert done.stderr.startswith("1 answers of 1 programs\n")
    assert export("a", "--output", str(file)).exit_code == 1, "who names a program wants to know"


def test_a_program_that_goes_on_is_kept_and_the_others_are_deleted(server: Server, tmp_path: Path) -> None:
    server.programs |= {name: [turn(name, 1, ANSWER)] for name in ("b/c", "d", "e")}
    server.refusals |= {("DELETE", "a"): 409, ("DELETE", "d"): 404}
    done = export("--output", str(tmp_path / "out.jsonl"), "--delete")
    assert done.exit_code == 0, done.output
    assert [path for path, _ in server.deleted] == ["/v1/programs/b/c/tokens", "/v1/programs/e/tokens"]
    assert "1 programs are kept" in done.stderr


def test_one_program_to_the_terminal(server: Server) -> None:
    done = export("a")
    assert [json.loads(line)["turn"] for line in done.stdout.splitlines()] == [1, 2, 2]
    assert not server.deleted


def test_parquet_has_the_same_rows(server: Server, tmp_path: Path) -> None:
    lines, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    assert export("--output", str(lines)).exit_code == 0
    done = export("--output", str(table), "--format", "parquet")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for row in rows:
        row["stop_reason"] = None if row["stop_reason"] is None else str(row["stop_reason"])
    assert read_table(table).to_pylist() == rows


def test_parquet_needs_a_file_and_a_file_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    assert "--output" in export("--format", "parquet").output
    done = export("--output", str(tmp_path / "none" / "out.jsonl"), "--delete")
    assert done.exit_code == 1
    assert "out.jsonl" in done.output
    assert not server.deleted


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_that_fails_keeps_the_earlier_file(server: Server, tmp_path: Path, format: str) -> None:
    server.refusals[("GET", "b/c")] = 500
    (tmp_path / "tokens").write_text("earlier\n")
    assert export("a", "b/c", "--format", format, "--output", str(tmp_path / "tokens")).exit_code == 1
    assert {file.name: file.read_text(errors="replace") for file in tmp_path.iterdir()} == {"tokens": "earlier\n"}


def test_an_export_into_what_is_no_file_is_written_there(server: Server, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert export("a", "--output", str(pipe)).exit_code == 0
        assert len(os.read(reader, 1 << 16).splitlines()) == 3
    finally:
        os.close(reader)
    assert pipe.is_fifo()
