"""`caesura trace`: what it prints, and its exit statuses."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app, main
from cluster.core.errors import ConfigError
from cluster.offline.commands import trace
from cluster.offline.traces.format import BLOCK_TOKENS, Options
from tests.traces.programs import written
from tests.traces.test_bad_input import MOONCAKE

PLENTY = {"timestamp": 500, "input_length": 2000, "output_length": 7, "hash_ids": [1, 2, 3, 4]}


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_what_is_kept_and_lost_is_printed_with_counts(tmp_path: Path) -> None:
    ours, theirs, back = (tmp_path / f"{name}.jsonl" for name in ("ours", "theirs", "back"))
    written(theirs, {**MOONCAKE, "input_length": 1024}, PLENTY)
    printed = run("convert", theirs, ours, "--from", "mooncake", "--to", "caesura").splitlines()
    assert printed == [
        f"wrote {ours}: 1 programs, 2 turns, 0 tool durations not recorded",
        "mooncake carries: arrival, prompt and output tokens of each request, shared blocks of prompts; requests are "
        "linked by their blocks",
        "caesura carries: everything of a program",
        "lost: time of generation, which is part of the pause after it (turns): 1",
    ]
    printed = run("convert", ours, back, "--from", "caesura", "--to", "mooncake").splitlines()
    assert "lost: names of tools (turns): 1" in printed
    assert run("check", ours) == f"{ours} is valid: 1 programs, 2 turns, 0 tool durations not recorded\n"
    assert run("check", back, "--format", "mooncake").startswith(f"{back} is valid: 1 programs, 2 turns")


def test_a_bad_line_is_one_line_of_output_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in.jsonl", MOONCAKE, {**MOONCAKE, "output_length": -1})
    monkeypatch.setattr(sys, "argv", ["caesura", "trace", "check", str(file), "--format", "mooncake"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    expected = f"{file}:2: output_length: Input should be greater than or equal to 0\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_distance_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    file = written(tmp_path / "in.jsonl", MOONCAKE)
    with pytest.raises(ConfigError, match="--every-s: "):
        run("convert", file, tmp_path / "out", "--from", "mooncake", "--to", "otel", "--every-s", value)


def test_the_command_has_the_defaults_of_the_formats() -> None:
    assert trace.BLOCK_TOKENS == BLOCK_TOKENS == Options().block_tokens
