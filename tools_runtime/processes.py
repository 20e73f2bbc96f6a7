"""Processes that run tools. Each is started in a process group, read up to a bound, and killed with its group."""

import asyncio
import codecs
import contextlib
import os
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence

from cluster.core.errors import ToolRefused

AS_NOBODY = ("--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--")
"""Options of setpriv: a user and a group without any rights. They are needed because Linux does not apply the limit on
processes to root."""

READ_BYTES = 64 << 10


class Child:
    """A process in a session and a group of its own, whose output is a pipe.

    The pipe is not asyncio's, so that it can be closed while another process still writes to it.
    """

    def __init__(self, process: Process, output: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
        self.process = process
        self.output = output
        self._pipe = pipe

    @property
    def alive(self) -> bool:
        """Whether it is not known to have ended."""
        return self.process.returncode is None

    def end(self) -> None:
        """Kill it and its group, and close the pipe. It is safe to call again."""
        if self.alive:  # otherwise its pid may belong to another process by now
            _kill_group(self.process)
        self._pipe.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def wait(self, *, leave_none: bool) -> int:
        """Wait for its exit status.

        With ``leave_none``, processes that it left running in its group are then killed.
        """
        status = await self.process.wait()
        if leave_none:
            _kill_group(self.process)
        return status

    async def reaped(self) -> None:
        """Wait until a killed process is gone."""
        await self.process.wait()


async def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    feed: bool = False,
    join_errors: bool = True,
    cwd: str = "/",
) -> Child:
    """Start a process.

    Args:
        argv: the command.
        environment: its whole environment.
        feed: whether it gets a pipe as stdin. Otherwise stdin is empty.
        join_errors: whether its stderr is part of its output. Otherwise stderr is dropped.
        cwd: its working directory.

    Raises:
        ToolRefused: it cannot be started: there is no such file, or an argument is not possible.
    """
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        raise ToolRefused(f"the command {argv[0]!r} cannot be started: No such file or directory")
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *_tied(),
            *argv,
            stdin=PIPE if feed else DEVNULL,
            stdout=writing,
            stderr=writing if join_errors else DEVNULL,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(reading)
        reason = error.strerror if isinstance(error, OSError) else error
        raise ToolRefused(f"the command {argv[0]!r} cannot be started: {reason}") from error
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    output = asyncio.StreamReader(limit=READ_BYTES)
    try:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", buffering=0)
        )
    except BaseException:  # the caller gets no process that it could end
        if process.returncode is None:
            _kill_group(process)
        if process.stdin is not None:
            process.stdin.close()
        raise
    return Child(process, output, pipe)


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _tied() -> list[str]:
    """Return the command prefix with which Linux kills the process when its parent dies."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--"]


def text_decoder(charset: str = "utf-8") -> codecs.IncrementalDecoder:
    """Return a decoder of text in pieces, which may be split within a character. Invalid bytes are replaced."""
    return codecs.getincrementaldecoder(charset)(errors="replace")


async def read_bounded(
    reader: asyncio.StreamReader, cap_bytes: int, report: Callable[[str], object] | None = None
) -> tuple[bytearray, bool]:
    """Read to the end, at most ``cap_bytes``. Return what was read, and whether there was more.

    ``report`` receives the text while it is read.
    """
    answer = bytearray()
    decoder = text_decoder()
    while chunk := await reader.read(min(READ_BYTES, cap_bytes - len(answer) + 1)):
        answer += chunk
        if report is not None:
            report(decoder.decode(chunk))
        if len(answer) > cap_bytes:
            del answer[cap_bytes:]
            return answer, True
    return answer, False
