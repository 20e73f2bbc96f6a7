"""What the page of traces shows is done: its commands run on small files of other formats."""

import json
import subprocess
import sys
from pathlib import Path

from cluster.core.recorded_turn import recorded_programs
from tests.docs.pages import DOCS, ROOT, blocks
from tests.traces.programs import written
from tests.traces.test_bad_input import export
from tests.traces.test_formats import call, request, tool

WITHIN_S = 240
SHELL = """set -euo pipefail
caesura() {{ {python} -c 'from cluster.cli import main; main()' "$@"; }}
"""


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    requests = [request(500 * number, 700 + 300 * number, 20, *range(2 + number // 2)) for number in range(3)]
    others = [request(100 + 900 * number, 1500, 30, *range(100 * number, 100 * number + 3)) for number in range(1, 9)]
    written(tmp_path / "conversation_trace.jsonl", *requests, *others)
    written(tmp_path / "spans.jsonl", export(call(1, 2, 100, 10), tool(2, 3, "bash"), call(3, 4, 150, 10)))
    shown = [block.text for block in blocks(DOCS / "traces.md", "bash") if not block.not_run]
    assert len(shown) == 2
    done = subprocess.run(
        ["bash"], input=SHELL.format(python=sys.executable) + "\n".join(shown), cwd=tmp_path, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrote mooncake.jsonl.gz: 9 programs, 11 turns, 0 tool durations not recorded" in done.stdout
    assert "lost: time of generation, which is part of the pause after it (turns): 2" in done.stdout
    assert "Programs in the pool: 9; dropped as too long: 0." in done.stdout
    assert "agents.jsonl.gz is valid: 1 programs, 2 turns, 0 tool durations not recorded" in done.stdout


def test_the_trace_of_the_page_is_valid(tmp_path: Path) -> None:
    (shown,) = [block.text for block in blocks(DOCS / "traces.md", "json")]
    written(tmp_path / "a.jsonl", json.dumps(json.loads(shown)))
    ((_, program),) = recorded_programs(tmp_path / "a.jsonl")
    assert program.arrival_s == 0.0
    assert [turn.tool_class for turn in program.turns] == ["bash:grep", None]
