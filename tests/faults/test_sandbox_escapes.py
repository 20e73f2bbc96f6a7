"""Commands that want out of their sandbox, or all of the machine. What each limit does: tests/tools/test_sandbox.py."""

import asyncio
import shutil
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.tools import ToolsConfig
from cluster.core.tools import ToolCall, ToolResult
from tools_runtime.host import ToolHost

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

FAULT = "a sandbox to escape from"
PROCESSES = 12
SCRATCH_BYTES = 4 << 20
OUTPUT_BYTES = 4096

Bash = Callable[[str], Awaitable[ToolResult]]


@pytest.fixture
async def bash() -> AsyncIterator[Bash]:
    """Runs a command in a small sandbox."""
    limits = {"processes": PROCESSES, "scratch_bytes": SCRATCH_BYTES, "memory_bytes": 256 << 20, "cpu_s": 2}
    tool = {"kind": "command", "shell": True, "deadline_s": 8.0, "output_cap_bytes": OUTPUT_BYTES, **limits}
    host = ToolHost(ToolsConfig.model_validate({"defined": {"bash": tool}}))
    await host.open()

    async def run(command: str) -> ToolResult:
        return await host.run(ToolCall("a", "bash", {"command": command}))

    yield run
    await host.aclose()


async def test_a_fork_bomb(bash: Bash, promised: Any) -> None:
    most, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, len(bombs()))

    def bombs() -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline"])
        return [one for one in every if "a-fork-bomb" in " ".join(one.info["cmdline"] or ()) and _is_bash(one)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = await bash(
        "b() { b | b & b; }; : a-fork-bomb; timeout 2 bash -c 'b() { b | b & b; }; : a-fork-bomb; b'; true"
    )
    stop.set()
    watcher.join()
    left: list[psutil.Process] = []
    for _ in range(50):
        if not (left := bombs()):
            break
        await asyncio.sleep(0.1)
    assert result.text
    promised(FAULT, "processes of a fork bomb at a time", most, at_most=PROCESSES + 4)
    promised(FAULT, "processes left of it", len(left), exactly=0)


def _is_bash(process: psutil.Process) -> bool:
    try:
        return process.name() in ("bash", "timeout", "bwrap", "prlimit")
    except psutil.Error:
        return False


async def test_a_zip_bomb(bash: Bash, tmp_path: Path, promised: Any) -> None:
    """A gigabyte in a megabyte, unpacked into the scratch directory and into the answer."""
    bomb = zlib.compress(bytes(1 << 20)).hex()
    unpacked = f"d = zlib.decompress(bytes.fromhex('{bomb}'))"
    script = f"import sys, zlib; {unpacked}\nfor _ in range(1024): sys.stdout.buffer.write(d)"
    free = shutil.disk_usage("/tmp").free
    to_file = await bash(f'python3 -c "{script}" > /tmp/all 2>/dev/null; stat -c %s /tmp/all')
    size = int(to_file.text.split("\n")[-2] if to_file.text.endswith("\n") else to_file.text.split()[-1])
    told = await bash(f'python3 -c "{script}"')
    written = max(0, free - shutil.disk_usage("/tmp").free)
    promised(FAULT, "bytes that a zip bomb unpacks to", size, at_most=SCRATCH_BYTES)
    promised(FAULT, "characters of it that are told", len(told.text), at_most=OUTPUT_BYTES + 300)
    assert written < 1 << 29


async def test_files(bash: Bash, tmp_path: Path, promised: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary-of-a-file")
    places = "/proc/1/environ /etc/shadow /etc/passwd-"
    targets = "/usr/x /etc/x /proc/sys/kernel/core_pattern /sys/fs/cgroup/x /dev/sda"
    tries = f"""cat {places} {secret} /proc/1/root{secret} /proc/self/root{secret}
        ln -s {secret} /tmp/l; cat /tmp/l; ls /root /home; head -c 9 /proc/kcore; mount -t proc none /mnt
        mknod /tmp/d b 8 0 && head -c 512 /tmp/d
        chroot / cat {secret}; nsenter -t 1 -m cat {secret}; unshare -r cat {secret}
        for f in {targets}; do echo canary-write > $f && echo wrote $f; done
        echo end"""
    result = await bash(tries)
    found = result.text.count("canary-of-a-file") + sum(result.text.count(f"root:{mark}:") for mark in "x*!")
    assert "end" in result.text
    promised(FAULT, "files of the machine read", found, exactly=0)
    promised(FAULT, "files of the machine written", result.text.count("wrote"), exactly=0)


async def test_network(bash: Bash, promised: Any) -> None:
    arrived = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind("\0caesura-test-escape")
        abstract.listen()
        abstract.settimeout(0.2)
        connect = (
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'caesura-test-escape'); print('in')"
        )
        said = await bash(
            f"for a in 127.0.0.1 ::1 169.254.169.254; do (exec 3<>/dev/tcp/$a/{port}) && echo in; done; "
            f'python3 -c "{connect}"; ls /run /var/run | head -3; echo end'
        )
        for one in (listener, abstract):
            with suppress(TimeoutError):
                one.accept()[0].close()
                arrived += 1
        abstract.close()
    assert "end" in said.text and "\nin" not in said.text, said.text
    promised(FAULT, "connections out of it", arrived, exactly=0)
