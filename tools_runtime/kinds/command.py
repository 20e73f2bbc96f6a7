"""Commands in a sandbox. bubblewrap gives them no network, a read-only root and a separate process namespace.

prlimit sets the limits. bubblewrap does not limit the memory of a call: it is limited for each process, so that a call
has at most `processes` times `memory_bytes`. Only the scratch directories (/tmp, /dev/shm) are limited as a whole.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.config.tools import PLACEHOLDER, CommandTool
from cluster.core.errors import ConfigError, ToolFailed, ToolRefused
from tools_runtime.kind import Invocation, SingleTool, ToolOutput
from tools_runtime.processes import AS_NOBODY, READ_BYTES, read_bounded, spawn

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRATCH = "/tmp"
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime")

SHELL_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "A bash command line"}},
    "required": ["command"],
    "additionalProperties": False,
}

_CHECK_S = 10.0
"""Seconds within which bubblewrap must start a command when it is tested."""

_SHORTAGES = (os.strerror(errno.EAGAIN), os.strerror(errno.ENOMEM))
"""Errors of bubblewrap that pass: too many processes, or too little memory."""


class CommandKind(SingleTool):
    """One command.

    Raises:
        ConfigError: the schema cannot be used.
    """

    def __init__(self, name: str, config: CommandTool) -> None:
        parameters = config.parameters
        if config.shell and "properties" not in parameters:
            parameters = SHELL_PARAMETERS
        try:
            super().__init__(name, config.description, parameters)
        except ValueError as error:
            raise ConfigError(f"tools.defined.{name}.parameters: {error}") from None
        self._config = config
        self._bwrap = shutil.which("bwrap")
        self._prlimit = shutil.which("prlimit")
        self._setpriv = shutil.which("setpriv")
        self._tested = False
        """Whether it is known that there is a sandbox, or that there is none."""
        self._problem: str | None = None
        """The reason why there is no sandbox, or None if there is one."""

    async def open(self) -> None:
        """Test the sandbox. If the test cannot be run now, the first call runs it again."""
        with suppress(ToolRefused):
            await self._test_sandbox()

    async def run(self, invocation: Invocation) -> ToolOutput:
        """Run the command in a fresh sandbox.

        Raises:
            ToolRefused: there is no sandbox, it cannot be tested now, or the arguments make no command line.
            ToolFailed: its exit status is not 0, or its output exceeded the cap and it was killed.
        """
        argv = command_line(self._config, invocation.arguments)
        await self._test_sandbox()
        if self._problem is None:
            child = await spawn(self._sandboxed(argv), {})
        elif self._config.allow_unsandboxed:
            environment = {"PATH": PATH, "HOME": SCRATCH, "LANG": "C.UTF-8", **self._config.environment}
            child = await spawn((*self._limits(), *argv), environment, cwd=SCRATCH)
        else:
            raise ToolRefused(f"{self._problem}; `allow_unsandboxed: true` would run the command without a sandbox")
        # With the sandbox's first process all others in it end; without one, they would go on.
        ending = asyncio.create_task(child.wait(leave_none=self._problem is not None))
        try:
            answer, more = await read_bounded(child.output, invocation.output_cap_bytes, invocation.report)
            status = None if more else await ending
        finally:
            child.end()
            ending.cancel()
        text = answer.decode(errors="replace")
        del answer  # an exception would keep it
        if more:
            raise ToolFailed(text, note=f"the command was ended: it said more than {invocation.output_cap_bytes} bytes")
        if status != 0:
            raise ToolFailed(text, note=f"exit status {status}")
        return ToolOutput(text)

    async def aclose(self) -> None:
        """Do nothing: nothing is kept between calls."""

    async def _test_sandbox(self) -> None:
        """Find out once whether there is a sandbox.

        Raises:
            ToolRefused: the test could not be run to its end, as on a machine under load. It says nothing of the
                sandbox, and the next call tests again.
        """
        if not self._tested:
            self._problem = await self._sandbox_problem()
            self._tested = True

    async def _sandbox_problem(self) -> str | None:
        """Return what is missing or what bubblewrap reports, or None if there is a sandbox.

        Raises:
            ToolRefused: see `_test_sandbox`.
        """
        if self._bwrap is None:
            return "bubblewrap (bwrap) is not installed, so there is no sandbox"
        if self._prlimit is None:
            return "prlimit (util-linux) is not installed, so there is no sandbox with limits"
        if self._setpriv is None and os.geteuid() == 0:
            return "setpriv (util-linux) is not installed, so there is no sandbox with limits for root"
        again = "the sandbox could not be tested, and the next call tests it again"
        try:
            child = await spawn(self._sandboxed(["true"]), {})
        except ToolRefused as refusal:
            raise ToolRefused(f"{again}: {refusal}") from refusal
        try:
            async with asyncio.timeout(_CHECK_S):
                said, _ = await read_bounded(child.output, READ_BYTES)
                status = await child.wait(leave_none=False)
        except TimeoutError:
            raise ToolRefused(f"{again}: bubblewrap did not answer within {_CHECK_S:g} s") from None
        finally:
            child.end()
        reason = said.decode(errors="replace").strip()[:200]
        if status < 0:
            raise ToolRefused(f"{again}: bubblewrap was ended by signal {-status}")
        if status != 0 and any(shortage in reason for shortage in _SHORTAGES):
            raise ToolRefused(f"{again}: {reason}")
        return None if status == 0 else f"bubblewrap does not work here ({reason}), so there is no sandbox"

    def _limits(self) -> list[str]:
        config = self._config
        limits = {
            "cpu": config.cpu_s,
            "as": config.memory_bytes,
            "nproc": config.processes,
            "fsize": config.scratch_bytes,
            "nofile": config.open_files,
            "core": 0,
        }
        if self._prlimit is None:
            raise ToolRefused("prlimit (util-linux) is not installed, so there are no limits for the command")
        return [self._prlimit, *(f"--{name}={value}" for name, value in limits.items()), "--"]

    def _sandboxed(self, argv: list[str]) -> list[str]:
        assert self._bwrap is not None
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        options += ["--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox", "--uid", "65534", "--gid", "65534"]
        for name, value in {"PATH": PATH, "HOME": SCRATCH, "LANG": "C.UTF-8", **self._config.environment}.items():
            options += ["--setenv", name, value]
        options += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        for name in SYSTEM_LINKS:
            path = Path("/", name)
            if path.is_symlink():
                options += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                options += ["--ro-bind", str(path), str(path)]
        for scratch in (SCRATCH, "/dev/shm"):
            options += ["--size", str(self._config.scratch_bytes), "--perms", "1777", "--tmpfs", scratch]
        for name in (*SYSTEM_FILES, *self._config.read_only_paths):
            options += ["--ro-bind-try", name, name]
        # bubblewrap's own / and /dev could be written to, without a limit.
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH]
        # Inside, so that the limit on processes counts those of this sandbox alone.
        nobody = [self._setpriv, *AS_NOBODY] if self._setpriv is not None and os.geteuid() == 0 else []
        return [*nobody, self._bwrap, *options, "--", *self._limits(), *argv]


def command_line(config: CommandTool, arguments: Mapping[str, Any]) -> list[str]:
    """Return the argument vector. Each argument stays within the element that names it.

    Raises:
        ToolRefused: a required argument is missing, or the command would take an argument for an option.
    """
    if config.shell:
        return ["/bin/bash", "-c", _text(arguments.get("command", ""))]
    argv: list[str] = []
    is_behind = False
    for element in config.argv:
        names = PLACEHOLDER.findall(element)
        missing = [name for name in names if name not in arguments]
        if missing and element != f"{{{missing[0]}}}":
            raise ToolRefused(f"the argument {missing[0]!r} is missing")
        if missing:
            continue
        text = PLACEHOLDER.sub(lambda match: _text(arguments[match[1]]), element)
        if names and not (is_behind or config.allow_options):
            _require_no_option(element, text, names)
        argv.append(text)
        is_behind = is_behind or element == "--"  # behind it, a command has no options
    return argv


def _require_no_option(element: str, text: str, names: Sequence[str]) -> None:
    """Check that an argument does not begin an option. The template may: `--file={name}` is always this option."""
    before = element.partition("{")[0]
    if not before.strip("-") and text[len(before) :].startswith("-"):
        raise ToolRefused(f"the argument {names[0]!r} must not begin with '-'")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        text = str(value)
        if "\0" in text:
            raise ToolRefused("a command line takes no NUL character")
        return text
    raise ToolRefused(f"a command line takes text and numbers, not {type(value).__name__}")
