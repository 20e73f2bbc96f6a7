"""Unmodified agents and libraries, as docs/clients.md configures them, each in a loop of tool calls on a real cluster.

`make clients` installs them in `.cache/clients`, and shows the table that is written to `out/clients.md`. What is not
installed is skipped.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.core.program import USER_REPLY
from replicas.tiny.tool_loop import ANSWER, CALLS
from tests.docs.pages import DOCS, FENCE, ROOT
from tests.serving.served import served

pytestmark = [pytest.mark.cluster, pytest.mark.own_ray]

INSTALLED = ROOT / ".cache" / "clients"
PYTHON = INSTALLED / "python" / "bin" / "python"
COMMANDS = INSTALLED / "node_modules" / ".bin"

TABLE = ROOT / "out" / "clients.md"

SHOWN = "http://127.0.0.1:8000"
WITHIN_S = 240
LIBRARIES = {
    "LangChain": "langchain-1",
    "OpenAI Agents SDK": "agents-sdk-1",
    "pydantic-ai": "pydantic-ai-1",
}
"""Sections of the page whose example is a program, and the session that it names."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one client did."""

    client: str
    turns: int
    calls: int
    second_reused: float
    """Share of the first turn's prompt that the second turn found in the prefix cache."""
    least_reused: float
    """The lowest such share of a turn and the turn before it."""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """The table's rows, which are written at the end."""
    found: list[Row] = []
    yield found
    if found:
        lines = ["| client | turns | calls of a tool | second turn reuses, % | every turn reuses at least, % |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {one.client} | {one.turns} | {one.calls} | {one.second_reused:.0%} | {one.least_reused:.0%} |".replace(
                "%", ""
            )
            for one in found
        ]
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not INSTALLED.exists():
        pytest.skip("no clients are installed: make clients")
    config = yaml.safe_load((DOCS / "examples" / "clients.yaml").read_text())
    file = tmp_path_factory.mktemp("clients") / "caesura.yaml"
    file.write_text(yaml.safe_dump({**config, "http": {"port": 0}}))
    with served(file) as url:
        yield url


def example(section: str, url: str) -> str:
    """The page's block in this section, for this test's server."""
    page = (DOCS / "clients.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    block = FENCE.search(page)
    assert block is not None, section
    return block["text"].replace(SHOWN, url)


def run(command: list[str], home: Path, text: str | None = None) -> str:
    """What the client prints. It has a home of its own, and may reach only loopback by its settings."""
    ours = {"HOME": str(home), "PATH": f"{COMMANDS}:{os.environ['PATH']}", "DO_NOT_TRACK": "1", "CI": "1"}
    done = subprocess.run(
        command, cwd=home, env=ours, input=text or "", capture_output=True, text=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert ANSWER in done.stdout, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def looped(client: str, url: str, session: str) -> Row:
    """The server saw the whole loop as one program, and each turn reused nearly all of the prompt before it."""
    story = httpx.get(f"{url}/v1/programs/{session}", timeout=30).json()
    turns = story["turns"][-CALLS - 1 :]
    assert len(turns) > CALLS, json.dumps(story, indent=1)
    assert [turn["tools"] == [USER_REPLY] for turn in turns] == [False] * CALLS + [True], turns
    reused = [after["cached_tokens"] / before["prompt_tokens"] for before, after in pairwise(turns)]
    # At least the last block, of 32 tokens, is computed again; a library's first prompt has six blocks.
    short = [max(0.0, 1 - 64 / before["prompt_tokens"]) for before in turns]
    assert all(share >= min(0.95, least) for share, least in zip(reused, short, strict=False)), turns
    return Row(client, len(turns), CALLS, reused[0], min(reused))


def installed(command: str) -> None:
    if not (COMMANDS / command).exists():
        pytest.skip(f"{command} is not installed: make clients")


@pytest.mark.parametrize("section", LIBRARIES)
def test_libraries(url: str, rows: list[Row], section: str, tmp_path: Path) -> None:
    run([str(PYTHON), "-"], tmp_path, example(section, url))
    rows.append(looped(section, url, LIBRARIES[section]))


def test_vercel_ai_sdk(url: str, rows: list[Row], tmp_path: Path) -> None:
    installed("node")
    (tmp_path / "node_modules").symlink_to(COMMANDS.parent)
    (tmp_path / "loop.mjs").write_text(example("Vercel AI SDK", url))
    run([str(COMMANDS / "node"), "--preserve-symlinks", "--preserve-symlinks-main", "loop.mjs"], tmp_path)
    rows.append(looped("Vercel AI SDK", url, "ai-sdk-1"))


def test_opencode(url: str, rows: list[Row], tmp_path: Path) -> None:
    installed("opencode")
    (tmp_path / "opencode.json").write_text(example("OpenCode", url))
    printed = run(["opencode", "run", "--format", "json", "--model", "caesura/tiny", "List the files."], tmp_path)
    session = re.search(r'"sessionID":\s*"([^"]+)"', printed)
    assert session is not None, printed
    rows.append(looped("OpenCode", url, session[1]))


def test_codex(url: str, rows: list[Row], tmp_path: Path) -> None:
    installed("codex")
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(example("Codex", url))
    flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    printed = run(["codex", "exec", *flags, "List the files."], tmp_path)
    session = re.search(r'"thread_id":\s*"([^"]+)"', printed)
    assert session is not None, printed
    rows.append(looped("Codex", url, session[1]))


def test_claude_code(url: str, rows: list[Row], tmp_path: Path) -> None:
    installed("claude")
    settings = re.findall(r"export (\w+)=(\S+)", example("Claude Code", url))
    quiet = {"DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    command = ["env", *(f"{name}={value}" for name, value in {**dict(settings), **quiet}.items()), "claude"]
    flags = ["-p", "--output-format", "json", "--permission-mode", "acceptEdits"]
    printed = run([*command, *flags, "List the files."], tmp_path)
    session = re.search(r'"session_id":\s*"([^"]+)"', printed)
    assert session is not None, printed
    rows.append(looped("Claude Code", url, session[1]))
