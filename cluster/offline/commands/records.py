"""`caesura programs export`: write the recorded tokens of programs to a file."""

import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import quote

import typer

from cluster.offline.commands._common import DEFAULT_URL, UNKNOWN, Refused, Url, replacing, send

PAGE = 100
"""Number of programs, and of turns, of one request."""

Format = Literal["jsonl", "parquet"]


class Rows(Protocol):
    """An open file of rows."""

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows to the file. Their keys are its columns."""
        ...


def export(
    program_ids: Annotated[list[str] | None, typer.Argument(help="The programs. Default: all recorded ones.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file. Default: stdout.")] = None,
    format: Annotated[Format, typer.Option(help="JSON lines, or Parquet.")] = "jsonl",
    delete: Annotated[bool, typer.Option("--delete", help="Delete the record of each program after it.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Write recorded tokens (`x-record: tokens`), a row for each answer of each turn."""
    if format == "parquet" and output is None:
        typer.echo("--format parquet needs a file: --output", err=True)
        raise typer.Exit(UNKNOWN)
    programs = answers = 0
    incomplete = 0
    done: dict[str, int] = {}
    try:
        with _opened(output, format) as rows:
            for name, turns in _programs(url, program_ids or ()):
                rows.write([row for turn in turns for row in rows_of(turn)])
                programs += 1
                answers += sum(len(turn["answers"]) for turn in turns)
                open_turns = sum(turn["status"] != "completed" for turn in turns)
                incomplete += open_turns
                if not open_turns:
                    done[name] = turns[-1]["turn"]
    except OSError as error:
        typer.echo(f"{output}: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error
    later = _delete(url, done) if delete else 0  # after the file is complete
    typer.echo(f"{answers} answers of {programs} programs", err=True)
    if incomplete:
        kept = "; their programs are kept" if delete else ""
        typer.echo(f"{incomplete} turns have no tokens: they are under way, or were not completed{kept}", err=True)
    if later:
        typer.echo(f"{later} programs are kept: a turn of theirs began after they were read", err=True)


def rows_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each answer of a turn. A turn without tokens has one row."""
    whole = {name: value for name, value in turn.items() if name not in ("object", "answers")}
    none = dict.fromkeys(("index", "token_ids", "logprobs", "finish_reason", "stop_reason", "weights"))
    answers = turn["answers"] or [none]
    return [
        {**whole, "answer": answer["index"], **{name: answer[name] for name in none if name != "index"}}
        for answer in answers
    ]


def _programs(url: str, names: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield these programs with their recorded turns. Without names, yield all that the server lists, except those that
    were deleted or have expired since.
    """
    if names:
        yield from ((name, list(_turns(url, name))) for name in names)
        return
    for name in _recorded(url):
        try:
            turns = list(_turns(url, name, expected=(HTTPStatus.NOT_FOUND,)))
        except Refused:
            continue
        yield name, turns


def _delete(url: str, last_turns: Mapping[str, int]) -> int:
    """Delete the records of programs. Return the number of those that are kept, because they have a later turn."""
    kept = 0
    for name, last in last_turns.items():
        expected = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
        try:
            send("DELETE", url, f"/v1/programs/{quote(name)}/tokens", {"last_turn": last}, expected=expected)
        except Refused as refused:
            kept += refused.status == HTTPStatus.CONFLICT
    return kept


def _recorded(url: str) -> Iterator[str]:
    after: str | None = None
    while True:
        page = send("GET", url, "/v1/records", {"limit": PAGE} | ({} if after is None else {"after": after}))
        yield from (one["id"] for one in page["data"])
        if not page["has_more"]:
            return
        after = page["last_id"]


def _turns(url: str, name: str, expected: Container[int] = ()) -> Iterator[dict[str, Any]]:
    after = 0
    while True:
        parameters = {"limit": PAGE, "after": after}
        page = send("GET", url, f"/v1/programs/{quote(name)}/tokens", parameters, expected=expected)
        yield from page["data"]
        if not page["has_more"]:
            return
        after = page["last_turn"]


@contextmanager
def _opened(output: Path | None, format: Format) -> Iterator[Rows]:
    """Open a new file, which takes the place of the old one only when all rows are written."""
    opened = _json_lines if format == "jsonl" else _parquet
    output = output and output.resolve()
    if output is None or (output.exists() and not output.is_file()):  # a pipe or a device is written itself
        with opened(output) as rows:
            yield rows
        return
    with replacing(output) as (part,), opened(part) as rows:
        yield rows


class _JsonLines:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")


@contextmanager
def _json_lines(output: Path | None) -> Iterator[Rows]:
    if output is None:
        yield _JsonLines(sys.stdout)
        return
    with output.open("w", encoding="utf-8") as file:
        yield _JsonLines(file)


class _Parquet:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        import pyarrow

        texts = [{**row, "stop_reason": _text(row["stop_reason"])} for row in rows]
        if texts:
            self._writer.write_table(pyarrow.Table.from_pylist(texts, schema=self._writer.schema))


def _text(reason: Any) -> str | None:
    """Return a stop string, or the digits of a stop token: a column has one type."""
    return None if reason is None else str(reason)


@contextmanager
def _parquet(output: Path | None) -> Iterator[Rows]:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    ids, text = pyarrow.list_(pyarrow.int32()), pyarrow.string()
    weights = pyarrow.list_(pyarrow.struct({"version": text, "from": pyarrow.int32()}))
    columns = {
        **dict.fromkeys(("program", "parent"), text),
        "turn": pyarrow.int32(),
        **dict.fromkeys(("request", "method", "model"), text),
        **dict.fromkeys(("began_at", "ended_at"), pyarrow.float64()),
        "status": text,
        "prompt_token_ids": ids,
        "answer": pyarrow.int32(),
        "token_ids": ids,
        "logprobs": pyarrow.list_(pyarrow.float32()),
        **dict.fromkeys(("finish_reason", "stop_reason"), text),
        "weights": weights,
    }
    with ParquetWriter(output, pyarrow.schema(columns)) as writer:
        yield _Parquet(writer)
