"""What the pages show is done: every example that asks a server, asked of a real one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT, blocks
from tests.serving.served import served

pytestmark = pytest.mark.cluster

SHOWN = "http://127.0.0.1:8000"
WITHIN_S = 120

# curl that fails where the server refuses, and commands of this tree against this test's server.
SHELL = """set -euo pipefail
curl() {{ command curl --silent --show-error --fail-with-body "$@"; echo; }}
caesura() {{
  case "$1" in
    programs) set -- "$@" --url {url} ;;
    tools|status) set -- "$@" --url {url} ;;
  esac
  {python} -c 'from cluster.cli import main; main()' "$@"
}}
"""

RUN_AS_ONE = ("api.md", "tools.md", "rollouts.md")
"""Pages whose shell examples stand on those before them."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = yaml.safe_load((DOCS / "examples" / "tools.yaml").read_text())
    config["http"] = {"port": 0}
    file = tmp_path_factory.mktemp("examples") / "caesura.yaml"
    file.write_text(yaml.safe_dump(config))
    with served(file) as url:
        yield url


def run(command: list[str], text: str, where: Path) -> str:
    done = subprocess.run(
        command, input=text, cwd=where, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, timeout=WITHIN_S,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def asking(page: str, language: str) -> list[str]:
    found = blocks(DOCS / page, language)
    return [one.text for one in found if not one.not_run and (SHOWN in one.text or "caesura" in one.text)]


@pytest.mark.parametrize("page", RUN_AS_ONE)
def test_shell_examples(url: str, page: str, tmp_path: Path) -> None:
    text = "\n".join(asking(page, "bash"))
    assert text
    run(["bash"], SHELL.format(url=url, python=sys.executable) + text.replace(SHOWN, url), tmp_path)


@pytest.mark.parametrize("page", ["index.md", "batches.md", *RUN_AS_ONE])
def test_python_examples(url: str, page: str, tmp_path: Path) -> None:
    for text in asking(page, "python"):
        assert run([sys.executable, "-"], text.replace(SHOWN, url), tmp_path)
