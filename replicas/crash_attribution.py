"""Finds the request that crashed the engine.

The suspect is the only request without a first token, or else the only request that the engine had. A crash is usually
caused by an unusual request, before its first token. The engine's process writes the id of the suspect into memory that
it shares with the replica's process, which reads it after the engine has died. Nobody is suspected where several
requests could be the cause, or where the engine was killed from outside.
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
"""Environment variable with the path of the file that is the shared memory. Without it nothing is written."""

SIZE = 1024
"""Size of the shared memory in bytes. It holds the id, padded with zeros."""

KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a process that was killed from outside."""


class SharedSuspect:
    """Memory that the engine and its replica share. It holds the id of at most one request.

    Args:
        file: a file of SIZE bytes.
    """

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap(opened.fileno(), SIZE)

    @property
    def request_id(self) -> str | None:
        """The engine's id of the suspected request, or None if no request is suspected."""
        return self._memory[:].rstrip(b"\0").decode(errors="replace") or None

    def is_turn(self, name: str) -> bool:
        """Return whether the suspect is the request of this name. The engine adds a random suffix to the name."""
        return self.request_id is not None and self.request_id.rpartition("-")[0] == name

    def write(self, request_id: str | None) -> None:
        """Suspect this request, or none if the id is None or longer than SIZE bytes."""
        name = (request_id or "").encode()
        self._memory[:] = (name if len(name) <= SIZE else b"").ljust(SIZE, b"\0")


@contextmanager
def shared_suspect() -> Iterator[SharedSuspect]:
    """Provide memory that is shared with an engine that is started in the block.

    The file is removed at the end of the block. The mapped memory lives as long as the two processes.
    """
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
    """Finds the suspect, in the engine's process: a turn that was scheduled and has no token yet.

    Args:
        requests: vLLM's requests of the scheduler, by id.
    """

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests
        self._unproven: set[str] = set()
        name = os.environ.get(VARIABLE)
        self._suspect = SharedSuspect(Path(name)) if name else None
        self._written: str | None = None

    def began(self, output: SchedulerOutput) -> None:
        """Update the suspect when a step begins: requests were scheduled, and others have got their first token."""
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
    """Return whether a dead engine was not killed from outside: it reported its failure, or its exit code shows it.

    Args:
        engine_client: vLLM's AsyncLLM.
    """
    manager = engine_client.engine_core.resources.engine_manager
    found_dead = [process for process in manager.processes if process.name == manager.failed_proc_name]
    return not any(process.exitcode in KILLED for process in found_dead)
