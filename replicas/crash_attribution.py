"""Which request broke the engine? The only one whose first token had not come, or else the only one that it had.

What breaks an engine is as a rule an unusual request, and it does so before its first token. The engine's process keeps
the id of the only one that may be it in memory that it shares with the replica's process, where it can be read after
the engine's death. Where several may be it, nobody is suspected; nor where the engine was killed from outside.
"""

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

VARIABLE = "CAESURA_SUSPECT_FILE"
"""Environment variable with the file that is the shared memory; without it nothing is written."""

SIZE = 1024
"""Bytes of it: the id, and zeros."""

KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a process that was ended from outside."""


class SharedSuspect:
    """Memory that the engine and its replica share, with the id of one request.

    Args:
        file: of SIZE bytes.
    """

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap(opened.fileno(), SIZE)

    @property
    def request_id(self) -> str | None:
        """The engine's id of the one request under suspicion; None: there is no such one."""
        return self._memory[:].rstrip(b"\0").decode(errors="replace") or None

    def is_turn(self, name: str) -> bool:
        """Whether the one is the request of this name; the engine's ids have something random after it."""
        return self.request_id is not None and self.request_id.rpartition("-")[0] == name

    def write(self, request_id: str | None) -> None:
        """Suspect this one, or nobody; an id that is too long is nobody's."""
        name = (request_id or "").encode()
        self._memory[:] = (name if len(name) <= SIZE else b"").ljust(SIZE, b"\0")


@contextmanager
def shared_suspect() -> Iterator[SharedSuspect]:
    """Memory that is shared with the engine that is started meanwhile; it lasts as long as both."""
    descriptor, name = tempfile.mkstemp(prefix="caesura-suspect-")
    try:
        os.truncate(descriptor, SIZE)
        os.environ[VARIABLE] = name
        yield SharedSuspect(Path(name))
    finally:
        os.environ.pop(VARIABLE, None)
        os.close(descriptor)
        Path(name).unlink()


class CrashAttribution:
    """In the engine's process: turns that have been given to the model, and of which no token has come.

    Args:
        requests: vLLM's, of the scheduler: all that it has.
    """

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests
        self._unproven: set[str] = set()
        name = os.environ.get(VARIABLE)
        self._suspect = SharedSuspect(Path(name)) if name else None
        self._written: str | None = None

    def began(self, output: SchedulerOutput) -> None:
        """A step begins: some turns are given to the model, and others' first tokens have come since the last one."""
        if self._suspect is None:
            return
        if self._unproven:
            known = self._requests
            self._unproven = {one for one in self._unproven if one in known and not known[one].num_output_tokens}
        self._unproven.update(new.req_id for new in output.scheduled_new_reqs)
        suspects = self._unproven or self._requests
        only = next(iter(suspects)) if len(suspects) == 1 else None
        if only != self._written:
            self._suspect.write(only)
            self._written = only


def died_by_itself(engine_client: Any) -> bool:
    """Whether a dead engine was not killed from outside: it reported its failure, or its exit code shows it.

    Args:
        engine_client: vLLM's AsyncLLM.
    """
    manager = engine_client.engine_core.resources.engine_manager
    found_dead = [process for process in manager.processes if process.name == manager.failed_proc_name]
    return not any(process.exitcode in KILLED for process in found_dead)
