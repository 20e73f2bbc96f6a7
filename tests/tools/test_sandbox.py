"""Commands in real sandboxes: what they can reach, how much they get, and how they end."""

import asyncio
import errno
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.tools import CommandTool
from cluster.core.errors import ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolResult
from tests.waiting import until
from tools_runtime.host import ToolHost
from tools_runtime.kinds import command as command_kind
from tools_runtime.kinds.command import command_line

OpenTools = Callable[..., Awaitable[ToolHost]]

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def bash(open_tools: OpenTools) -> Callable[..., Awaitable[ToolResult]]:
    async def run(command: str, **said: Any) -> ToolResult:
        host = await open_tools({"bash": {"kind": "command", "shell": True, **said}})
        return await host.run(ToolCall("a", "bash", {"command": command}))

    return run


Bash = Callable[..., Awaitable[ToolResult]]


@needs_bwrap
async def test_a_command_answers(bash: Bash) -> None:
    result = await bash("echo hello; echo there >&2; pwd; id -u")
    assert (result.outcome, result.text) == (Outcome.OK, "hello\nthere\n/tmp\n65534\n")


@needs_bwrap
async def test_output_is_readable_before_the_command_ends(open_tools: OpenTools) -> None:
    """Also where a character is split between two writes, and where bytes are no text."""
    host = await open_tools({"bash": {"kind": "command", "shell": True}})
    begin = "for i in $(seq 60); do echo line $i; done; printf 'caf\\xc3'; sleep 0.3; printf '\\xa9 \\xff'; sleep 0.3; "
    task = asyncio.create_task(host.run(ToolCall("a", "bash", {"command": begin + "seq 100"})))
    await until(lambda: host.executor.under_way)
    early = await asyncio.wait_for(host.executor.output("", "a", 0), 20)
    assert early is not None and early.startswith("line 1\n") and not task.done()
    result = await task
    assert (result.outcome, result.text.startswith(early)) == (Outcome.OK, True)
    assert "line 60\ncafé \ufffd1\n2\n" in result.text


@needs_bwrap
async def test_there_is_no_network(bash: Bash) -> None:
    result = await bash("tail -n +3 /proc/net/dev | cut -d: -f1; exec 3<>/dev/tcp/127.0.0.1/22")
    assert result.outcome is Outcome.ERROR
    assert result.text.split()[1] == "lo", "no interface but the sandbox's own loopback"
    assert "eth" not in result.text


@needs_bwrap
@pytest.mark.parametrize("path", ["/x", "/usr/x", "/bin/x", "/proc/sys/x", "/dev/x", "/etc/x"])
async def test_nothing_can_be_written_but_the_scratch_directory(bash: Bash, path: str) -> None:
    result = await bash(f"echo > /tmp/x && echo scratch; echo > {path}")
    assert result.outcome is Outcome.ERROR
    assert "scratch" in result.text


@needs_bwrap
async def test_nothing_of_this_machine_is_seen(bash: Bash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    (tmp_path / "mine").write_text("hidden")
    result = await bash(f"env; cat {tmp_path}/mine /etc/shadow; ls /root /home; ls /proc | grep -c '^[0-9]'")
    assert "hidden" not in result.text
    assert int(result.text.split("\n")[-2]) < 8, "only its own processes"


@needs_bwrap
async def test_what_the_operator_names_can_be_read_but_not_written(bash: Bash, tmp_path: Path) -> None:
    # Every part of the path must be readable for everybody, as the sandbox runs as nobody.
    for part in (tmp_path, *tmp_path.parents[:3]):
        part.chmod(0o755) if part != Path("/tmp") else None
    (tmp_path / "data").write_text("to be read")
    result = await bash(f"cat {tmp_path}/data; echo x > {tmp_path}/data", read_only_paths=[str(tmp_path)])
    assert "to be read" in result.text
    assert "Read-only file system" in result.text


@needs_bwrap
async def test_one_call_leaves_nothing_to_the_next(open_tools: OpenTools) -> None:
    host = await open_tools({"bash": {"kind": "command", "shell": True}})
    first = await host.run(ToolCall("a", "bash", {"command": "echo x > /tmp/left; ls /tmp"}))
    second = await host.run(ToolCall("b", "bash", {"command": "ls /tmp"}))
    assert (first.text, second.text) == ("left\n", "")


@needs_bwrap
@pytest.mark.parametrize(
    ("command", "limits", "says"),
    [
        ("python3 -c 'bytearray(1 << 30)'", {"memory_bytes": 256 << 20}, "MemoryError"),
        ("for i in $(seq 50); do sleep 20 & done", {"processes": 10}, "Resource temporarily unavailable"),
        ("head -c 2000000 /dev/zero > /tmp/x", {"scratch_bytes": 1 << 20}, "exit status"),
        ("while :; do :; done", {"cpu_s": 1}, "exit status"),
        ("ulimit -n", {"open_files": 20}, "20"),
        ("unshare --user true", {}, "unshare"),
        ("ulimit -u 9999", {"processes": 10}, "cannot modify limit"),
    ],
)
async def test_limits_hold(bash: Bash, command: str, limits: dict[str, int], says: str) -> None:
    result = await bash(command, **limits, deadline_s=60)
    assert says in result.text


@needs_bwrap
async def test_a_flood_is_cut_and_ended(bash: Bash) -> None:
    result = await bash("yes", output_cap_bytes=1000)
    assert (result.outcome, len(result.text) < 1200) == (Outcome.ERROR, True)
    assert result.text.endswith("[the command was ended: it said more than 1000 bytes]")


@needs_bwrap
async def test_a_status_is_told_with_what_was_said(bash: Bash) -> None:
    assert (await bash("echo why; exit 3")).text == "error: why\n[exit status 3]"


@needs_bwrap
async def test_everything_that_a_command_started_ends_with_it(open_tools: OpenTools) -> None:
    host = await open_tools({"bash": {"kind": "command", "shell": True, "deadline_s": 50}})
    name = "271828"  # seconds that nobody else sleeps
    command = f"(setsid sleep {name} &) ; sleep {name}"
    running = asyncio.create_task(host.run(ToolCall("a", "bash", {"command": command})))
    await until(lambda: len(sleepers(name)) == 2)
    found = sleepers(name)
    host.executor.cancel("", "a")
    assert (await running).outcome is Outcome.CANCELLED
    _, alive = psutil.wait_procs(found, timeout=20)
    assert alive == []


@needs_bwrap
async def test_a_call_ends_although_what_it_started_would_go_on(bash: Bash) -> None:
    assert (await bash("sleep 314159 & echo done", deadline_s=30)).text == "done\n"
    assert sleepers("314159") == []


def sleepers(seconds: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", seconds]]


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without bubblewrap."""
    for name in ("prlimit", "setpriv", "bash"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))


async def test_without_a_sandbox_nothing_runs_unless_it_is_allowed(no_bwrap: None, bash: Bash, tmp_path: Path) -> None:
    result = await bash("echo it ran")
    assert result.outcome is Outcome.REFUSED
    assert result.text.startswith("refused: bubblewrap (bwrap) is not installed")
    assert "allow_unsandboxed" in result.text


async def test_without_a_sandbox_it_runs_with_limits_where_that_is_allowed(no_bwrap: None, bash: Bash) -> None:
    allowed = {"allow_unsandboxed": True, "open_files": 33}
    assert (await bash("ulimit -n; sleep 161803 & ", **allowed)).text == "33\n"
    assert sleepers("161803") == [], "nothing is left running"


def fake_bwrap(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a bubblewrap into the path that the shell script ``body`` replaces while the returned file exists."""
    real, busy = shutil.which("bwrap"), tmp_path / "busy"
    busy.touch()
    script = tmp_path / "bwrap"
    script.write_text(f'#!/bin/bash\nif [ -e {busy} ]; then {body}; fi\nexec {real} "$@"\n')
    script.chmod(0o755)
    for part in (tmp_path, *tmp_path.parents[:3]):  # for a root that becomes nobody
        part.chmod(0o755) if part != Path("/tmp") else None
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return busy


@needs_bwrap
@pytest.mark.parametrize(
    "body",
    [
        "exec sleep 20",
        "kill -KILL $$",
        "echo 'bwrap: Creating new namespace failed: Resource temporarily unavailable'; exit 1",
        "echo 'bwrap: Out of memory: Cannot allocate memory'; exit 1",
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
async def test_a_test_under_load_refuses_one_call_and_is_repeated(
    body: str, allowed: bool, open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command_kind, "_CHECK_S", 0.5)
    busy = fake_bwrap(body, monkeypatch, tmp_path)
    host = await open_tools({"bash": {"kind": "command", "shell": True, "allow_unsandboxed": allowed}})
    first = await host.run(ToolCall("a", "bash", {"command": "echo it ran"}))
    assert (first.outcome, "it ran" in first.text) == (Outcome.REFUSED, False)
    assert "the sandbox could not be tested, and the next call tests it again" in first.text
    monkeypatch.setattr(command_kind, "_CHECK_S", 60.0)
    busy.unlink()
    second = await host.run(ToolCall("b", "bash", {"command": "id -u; ls /proc | grep -c '^[0-9]'"}))
    assert (second.outcome, second.text.split()[0]) == (Outcome.OK, "65534")
    assert int(second.text.split()[1]) < 8, "it ran in a sandbox"


@needs_bwrap
@pytest.mark.parametrize("allowed", [False, True])
async def test_a_process_that_cannot_be_started_says_nothing_of_the_sandbox(
    allowed: bool, open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as loaded:
        loaded.setattr(asyncio, "create_subprocess_exec", fails)
        host = await open_tools({"bash": {"kind": "command", "shell": True, "allow_unsandboxed": allowed}})
    result = await host.run(ToolCall("a", "bash", {"command": "id -u; ls /proc | grep -c '^[0-9]'"}))
    assert (result.outcome, result.text.split()[0]) == (Outcome.OK, "65534")
    assert int(result.text.split()[1]) < 8, "it ran in a sandbox"


@needs_bwrap
async def test_a_bubblewrap_that_reports_that_it_cannot_is_not_tested_again(
    open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    count.touch()
    count.chmod(0o666)
    body = f"echo x >> {count}; echo 'bwrap: No permissions to create new namespace'; exit 1"
    fake_bwrap(body, monkeypatch, tmp_path)
    host = await open_tools({"bash": {"kind": "command", "shell": True, "allow_unsandboxed": True}})
    for call in ("a", "b"):
        assert (await host.run(ToolCall(call, "bash", {"command": "echo it ran"}))).text == "it ran\n"
    assert count.read_text() == "x\n"


@pytest.mark.parametrize("text", ["--help", "-", "--", -1, "-f/etc/passwd"])
def test_an_argument_becomes_no_option(text: str | int) -> None:
    given = {"file": text}
    with pytest.raises(ToolRefused, match="the argument 'file' must not begin with '-'"):
        command_line(CommandTool(kind="command", argv=["grep", "x", "{file}"]), given)
    for element in ("-{file}", "--{file}", "{before}{file}"):
        with pytest.raises(ToolRefused, match="must not begin with '-'"):
            command_line(CommandTool(kind="command", argv=["grep", element]), given | {"before": ""})
    behind = CommandTool(kind="command", argv=["grep", "--", "{file}"])
    assert command_line(behind, given) == ["grep", "--", str(text)]
    within = CommandTool(kind="command", argv=["grep", "--file={file}"])
    assert command_line(within, given) == ["grep", f"--file={text}"]
    allowed = CommandTool(kind="command", argv=["grep", "{file}"], allow_options=True)
    assert command_line(allowed, given) == ["grep", str(text)]


def test_an_argument_ends_no_options() -> None:
    """Only a `--` of the template does, not one that the call brings."""
    config = CommandTool(kind="command", argv=["tool", "-{flag}", "{file}"])
    for given in ({"flag": "-", "file": "x"}, {"flag": "v", "file": "-x"}):
        with pytest.raises(ToolRefused, match="must not begin with '-'"):
            command_line(config, given)


def test_an_argument_has_no_nul() -> None:
    with pytest.raises(ToolRefused, match="NUL"):
        command_line(CommandTool(kind="command", argv=["grep", "{file}"]), {"file": "a\0b"})


def test_arguments_stay_within_their_element() -> None:
    config = CommandTool(kind="command", argv=["grep", "-n", "--max-count={n}", "--", "{pattern}", "{path}"])
    nasty = "a b; rm -rf / $(x) `y` {path}"
    assert command_line(config, {"pattern": nasty, "n": 3}) == ["grep", "-n", "--max-count=3", "--", nasty]
    with pytest.raises(ToolRefused, match="'n' is missing"):
        command_line(config, {"pattern": "x"})
    with pytest.raises(ToolRefused, match="text and numbers"):
        command_line(config, {"pattern": ["x"], "n": 1})
