"""Shared code of commands: requests to a running server, output files, progress of steps, and lists of files.

Here and in every command, expensive modules are imported where they are used, so that ``caesura --help`` is fast.
"""

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperCommand

from cluster.core.clock import MonotonicClock
from cluster.core.errors import ConfigError

Url = Annotated[str, typer.Option(help="The server.", envvar="CAESURA_URL")]
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0

UNKNOWN = 1
"""Exit status if the server does not answer a request."""


class Refused(Exception):
    """The server answered with a status of an error that the caller expects."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def send(
    method: str, url: str, path: str, parameters: Mapping[str, Any] | None = None, *, expected: Container[int] = ()
) -> dict[str, Any]:
    """Send a request to the server, and return its JSON answer.

    ``expected``: the statuses of errors that the caller handles.

    Raises:
        Refused: the answer is an error with an expected status.
        Exit: there is no answer, or it is another error; the reason is on stderr.
    """
    body: dict[str, Any] = _of_json(_request(method, url, path, parameters, expected), url)
    return body


def send_for_text(method: str, url: str, path: str, parameters: Mapping[str, Any] | None = None) -> str:
    """Send a request to the server, and return the text of its answer. See `send`."""
    return str(_request(method, url, path, parameters).text)


def _request(
    method: str, url: str, path: str, parameters: Mapping[str, Any] | None, expected: Container[int] = ()
) -> Any:
    """Return the successful answer, an httpx.Response."""
    import httpx

    from cluster.auth.keys import client_headers

    try:
        headers = client_headers()
        answer = httpx.request(method, url.rstrip("/") + path, params=parameters, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error
    if answer.status_code in expected:
        raise Refused(answer.status_code)
    if not answer.is_success:
        typer.echo(f"{url}: {_reason(answer)}", err=True)
        raise typer.Exit(UNKNOWN)
    return answer


def _reason(answer: Any) -> str:
    """Return the message of an error. A server that is not Caesura's may answer with any body."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _of_json(answer: Any, url: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output files of a command. None: the output is not requested."""

    json_lines: Path | None = None
    record: Path | None = None
    plots: Path | None = None
    """Folder for the plots."""

    def check(self) -> None:
        """Check the outputs before a long run.

        Raises:
            ConfigError: an output cannot be written.
        """
        for flag, path in {"--json": self.json_lines, "--record": self.record}.items():
            if path is not None:
                with writing(flag):
                    path.touch()
        if self.plots is not None:
            with writing("--plots"):
                self.plots.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(flag: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the flag of an output."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag}: {error}") from error


@contextmanager
def whole_files(*paths: Path) -> Iterator[tuple[TextIO, ...]]:
    """Open new files for text. They take the place of the old ones at the end, unless an exception ends the context.

    Folders that are missing are made.
    """
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(*paths) as parts, ExitStack() as files:
        yield tuple(files.enter_context(part.open("w", encoding="utf-8")) for part in parts)


@contextmanager
def replacing(*paths: Path) -> Iterator[list[Path]]:
    """Give paths for new files. The files take the place of the old ones at the end, unless an exception ends the
    context.
    """
    parts = [path.with_name(path.name + ".part") for path in paths]
    try:
        yield parts
        for part, path in zip(parts, paths, strict=True):
            part.replace(path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def timed_steps(console: Console) -> Callable[[str], AbstractContextManager[None]]:
    """Return the ``step`` of a `LocalCluster`, which prints each step of its start and stop with its duration.

    A terminal shows the current step. Otherwise, stderr gets a line about it every ten seconds.
    """
    from cluster.offline.bench.terminal import heartbeat

    clock = MonotonicClock()

    @contextmanager
    def step(name: str) -> Iterator[None]:
        began_s = clock.now_s()
        waiting = heartbeat(lambda: f"{clock.now_s() - began_s:6.0f} s  {name}", sys.stderr)
        with console.status(name) if console.is_terminal else waiting:
            yield
        console.print(f"  {name:<32} {clock.now_s() - began_s:6.1f} s")

    return step


FILE_LISTS = ("--traces", "--text")


class FileListsCommand(TyperCommand):
    """A command whose options `FILE_LISTS` take one or several files, and may be repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments: see click."""
        return super().parse_args(ctx, repeated(args))


def repeated(args: Sequence[str]) -> list[str]:
    """Return the arguments with the option of a file list repeated before each of its files."""
    written: list[str] = []
    option: str | None = None
    for arg in args:
        if arg.startswith("-"):
            option = arg if arg in FILE_LISTS else None
            written.append(arg)
        elif option is not None and written[-1] != option:
            written += [option, arg]
        else:
            written.append(arg)
    return written
