"""Unmodified agents and libraries, as docs/clients.md configures them, each in a loop of tool calls on a real cluster.

`make clients` installs them in `.cache/clients`, and shows the table that is written to `out/clients.md`. What is not
installed is skipped.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.core.program import USER_REPLY
from replicas.tiny.tool_loop import ANSWER, CALLS
from tests.clients import litellm_proxy
from tests.clients.installed import (
    COMMANDS,
    INSTALLED,
    LITELLM,
    PYTHON,
    example,
    require,
    run,
    write_table,
)
from tests.clients.reuse import reused_shares
from tests.docs.pages import DOCS
from tests.serving.served import served

pytestmark = pytest.mark.cluster

LIBRARIES = {
    "LangChain": "langchain-1",
    "OpenAI Agents SDK": "agents-sdk-1",
    "pydantic-ai": "pydantic-ai-1",
}
"""Sections of the page whose example is a program, and the session that it names."""

BLOCK_TOKENS = 32
"""Tokens of a block of the prefix cache."""

REUSED = 0.95
"""The least share of what an exact continuation could reuse that every turn has."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one client did."""

    client: str
    turns: int
    calls: int
    state: str
    """The session's status and state in the list of programs, after its last turn."""
    prompt_tokens: int
    """Tokens of the last turn's prompt."""
    shares: list[float]
    """What each turn but the first reused, of what it could reuse."""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """The table's rows, which are written at the end."""
    found: list[Row] = []
    yield found
    heads = ["client", "turns", "calls of a tool", "status and state in the list", "tokens of the last prompt"]
    heads += ["second turn reuses, %", "every turn reuses at least, %"]
    lines = [
        [one.client, str(one.turns), str(one.calls), one.state, str(one.prompt_tokens)]
        + [f"{share:.0%}"[:-1] for share in (one.shares[0], min(one.shares))]
        for one in found
    ]
    write_table("clients.md", heads, lines)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not INSTALLED.exists():
        pytest.skip("no clients are installed: make clients")
    config = yaml.safe_load((DOCS / "examples" / "clients.yaml").read_text())
    file = tmp_path_factory.mktemp("clients") / "caesura.yaml"
    config["engine"]["block_size"] = BLOCK_TOKENS
    file.write_text(yaml.safe_dump({**config, "http": {"port": 0}}))
    with served(file) as url:
        yield url


def printed_by(command: list[str], home: Path, text: str = "") -> str:
    """What a client prints, which has to have the model's answer."""
    done = run(command, home, text)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert ANSWER in done.stdout, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def got(url: str) -> Any:
    answer = httpx.get(url, timeout=30)
    answer.raise_for_status()
    return answer.json()


def looped(client: str, url: str, session: str) -> Row:
    """The server saw the whole loop as one program, and each turn reused nearly all that it could."""
    story = got(f"{url}/v1/programs/{session}")
    turns = story["turns"][-CALLS - 1 :]
    assert len(turns) > CALLS, json.dumps(story, indent=1)
    assert [turn["tools"] == [USER_REPLY] for turn in turns] == [False] * CALLS + [True], turns
    listed = {one["id"]: one for one in got(f"{url}/v1/programs?limit=100")["data"]}[session]
    # A Responses request is a program that the cluster runs: it has ended, though its context is kept for the next.
    assert listed["status"] == ("completed" if listed["runs"] else "paused"), listed
    assert (listed["state"], listed["turns"]) == (story["phase"], len(story["turns"])), listed
    shares = reused_shares(turns, BLOCK_TOKENS)
    assert len(shares) == CALLS, turns
    assert min(shares) >= REUSED, turns
    return Row(client, len(turns), CALLS, f"{listed['status']}, {listed['state']}", turns[-1]["prompt_tokens"], shares)


@pytest.mark.parametrize("section", LIBRARIES)
def test_libraries(url: str, rows: list[Row], section: str, tmp_path: Path) -> None:
    printed_by([str(PYTHON), "-"], tmp_path, example(section, url))
    rows.append(looped(section, url, LIBRARIES[section]))


def test_vercel_ai_sdk(url: str, rows: list[Row], tmp_path: Path) -> None:
    require(COMMANDS / "node")
    (tmp_path / "node_modules").symlink_to(COMMANDS.parent)
    (tmp_path / "loop.mjs").write_text(example("Vercel AI SDK", url))
    printed_by([str(COMMANDS / "node"), "--preserve-symlinks", "--preserve-symlinks-main", "loop.mjs"], tmp_path)
    rows.append(looped("Vercel AI SDK", url, "ai-sdk-1"))


def test_opencode(url: str, rows: list[Row], tmp_path: Path) -> None:
    require(COMMANDS / "opencode")
    (tmp_path / "opencode.json").write_text(example("OpenCode", url))
    flags = ["--format", "json", "--model", "caesura/tiny"]
    printed = printed_by(["opencode", "run", *flags, "List the files."], tmp_path)
    session = re.search(r'"sessionID":\s*"([^"]+)"', printed)
    assert session is not None, printed
    rows.append(looped("OpenCode", url, session[1]))


def test_codex(url: str, rows: list[Row], tmp_path: Path) -> None:
    require(COMMANDS / "codex")
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(example("Codex", url))
    flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    printed = printed_by(["codex", "exec", *flags, "List the files."], tmp_path)
    session = re.search(r'"thread_id":\s*"([^"]+)"', printed)
    assert session is not None, printed
    rows.append(looped("Codex", url, session[1]))


def test_claude_code(url: str, rows: list[Row], tmp_path: Path) -> None:
    require(COMMANDS / "claude")
    settings = re.findall(r"export (\w+)=(\S+)", example("Claude Code", url))
    quiet = {"DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    command = ["env", *(f"{name}={value}" for name, value in {**dict(settings), **quiet}.items()), "claude"]
    flags = ["-p", "--output-format", "json", "--permission-mode", "acceptEdits"]
    printed = printed_by([*command, *flags, "List the files."], tmp_path)
    session = re.search(r'"session_id":\s*"([^"]+)"', printed)
    assert session is not None, printed
    rows.append(looped("Claude Code", url, session[1]))


@pytest.fixture(scope="module")
def proxy(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[litellm_proxy.Proxy]:
    require(LITELLM)
    config = example("LiteLLM", url).partition("<<'END'\n")[2].partition("END\n")[0]
    with litellm_proxy.started(LITELLM, config, tmp_path_factory.mktemp("litellm")) as proxy:
        yield proxy


@pytest.mark.parametrize("way", litellm_proxy.WAYS)
def test_litellm(url: str, proxy: litellm_proxy.Proxy, rows: list[Row], way: str) -> None:
    session = f"litellm-{list(litellm_proxy.WAYS).index(way)}"
    assert litellm_proxy.WAYS[way](proxy, session) == (CALLS, ANSWER)
    rows.append(looped(f"LiteLLM, {way}", url, session))
