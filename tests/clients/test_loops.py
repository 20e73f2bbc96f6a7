"""Unmodified agents and libraries, as docs/clients.md configures them, each in a loop of tool calls on a real cluster.

`make clients` installs them in `.cache/clients`. What is not installed is skipped.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from replicas.tiny.tool_loop import ANSWER, CALLS
from tests.docs.pages import DOCS, FENCE, ROOT
from tests.serving.served import served

pytestmark = [pytest.mark.cluster, pytest.mark.own_ray]

INSTALLED = ROOT / ".cache" / "clients"
PYTHON = INSTALLED / "python" / "bin" / "python"
COMMANDS = INSTALLED / "node_modules" / ".bin"

SHOWN = "http://127.0.0.1:8000"
WITHIN_S = 240
LIBRARIES = {
    "LangChain": "langchain-1",
    "OpenAI Agents SDK": "agents-sdk-1",
    "pydantic-ai": "pydantic-ai-1",
}
"""Sections of the page whose example is a program, and the session that it names."""


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


def assert_looped(url: str, session: str) -> None:
    """The server saw the whole loop as one program, and each later turn found the tokens of the turn before."""
    story = httpx.get(f"{url}/v1/programs/{session}", timeout=30).json()
    turns = story["turns"]
    assert len(turns) > CALLS, json.dumps(story, indent=1)
    for before, after in zip(turns[-CALLS - 1 :], turns[-CALLS:], strict=False):
        assert after["cached_tokens"] >= 0.8 * before["prompt_tokens"], turns
    assert all(turn["tools"] for turn in turns[-CALLS - 1 : -1]), turns


def installed(command: str) -> None:
    if not (COMMANDS / command).exists():
        pytest.skip(f"{command} is not installed: make clients")


@pytest.mark.parametrize("section", LIBRARIES)
def test_libraries(url: str, section: str, tmp_path: Path) -> None:
    run([str(PYTHON), "-"], tmp_path, example(section, url))
    assert_looped(url, LIBRARIES[section])


def test_opencode(url: str, tmp_path: Path) -> None:
    installed("opencode")
    (tmp_path / "opencode.json").write_text(example("OpenCode", url))
    printed = run(["opencode", "run", "--format", "json", "--model", "caesura/tiny", "List the files."], tmp_path)
    session = re.search(r'"sessionID":\s*"([^"]+)"', printed)
    assert session is not None, printed
    assert_looped(url, session[1])


def test_codex(url: str, tmp_path: Path) -> None:
    installed("codex")
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(example("Codex", url))
    flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    printed = run(["codex", "exec", *flags, "List the files."], tmp_path)
    session = re.search(r'"thread_id":\s*"([^"]+)"', printed)
    assert session is not None, printed
    assert_looped(url, session[1])
