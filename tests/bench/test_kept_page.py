"""benchmarks/README.md: where its rows come from, and the commands that it prints."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import readme
from benchmarks.readme import KeptError

ENTRY: dict[str, Any] = {"title": "T", "file": "t.jsonl", "group": ["policy"], "columns": {"good": "good/s"}}
NEWER, OLDER = {"commit": "bbb", "date": "2026-11-02"}, {"commit": "aaa", "date": "2026-11-01"}
COMMITS = [OLDER | {"policies": ["vllm", "mars"]}, NEWER | {"policies": ["caesura"]}]


def line(policy: str, **more: Any) -> dict[str, Any]:
    return {"policy": policy, "good": 2, "offered": 8, "command": f"caesura simulate --policies {policy}", **more}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)

    def table(rows: list[dict[str, Any]], **more: Any) -> str:
        (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return "\n".join(readme._table(ENTRY | more))

    return table


def test_rows_of_one_commit_have_one_origin(page: Any) -> None:
    table = page([line("vllm", **NEWER), line("caesura", **NEWER)])
    assert table.endswith("`caesura simulate`, 2026-11-02, commit bbb, `results/t.jsonl`")


@pytest.mark.parametrize(
    "rows",
    [
        [line("vllm", **OLDER), line("caesura", **NEWER)],
        [line("vllm"), line("caesura", **NEWER)],
        [line("vllm", **OLDER), line("caesura")],
        [line("vllm"), line("caesura")],
    ],
)
def test_rows_of_other_commits_or_of_none_are_refused_unless_they_are_named(
    page: Any, rows: list[dict[str, Any]]
) -> None:
    for named in ({}, NEWER):
        with pytest.raises(KeptError, match=r"t\.jsonl: its rows have the commits .*; name them in kept\.yaml"):
            page(rows, **named)
    table = page(rows, commits=COMMITS)
    assert "rows of several commits: 2026-11-01, aaa (`vllm`, `mars`); 2026-11-02, bbb (`caesura`)" in table


@pytest.mark.parametrize("row", [line("lamps"), line("caesura", **OLDER)])
def test_a_row_that_is_of_no_named_commit_is_refused(page: Any, row: dict[str, Any]) -> None:
    with pytest.raises(KeptError, match=f"the one commit of a row of {row['policy']}"):
        page([line("vllm", **OLDER), row], commits=COMMITS)


def test_a_column_may_be_a_quotient_and_notes_stand_before_the_table(page: Any) -> None:
    table = page([line("vllm", **NEWER)], columns={"good/offered": "share"}, text="Text.", notes=["One.", "Two."])
    assert "Text. One. Two.\n\n| policy | share |\n| --- | --- |\n| `vllm` | 0.25 |" in table


def test_the_page_says_of_older_tables_that_they_are_older() -> None:
    kept = yaml.safe_load((readme.HERE / "kept.yaml").read_text())
    tables = {entry["file"]: entry for entry in kept["tables"]}
    older = "where `vllm serve` allows 8,192 and 1,024 on an H100"
    for name in ("simulate_iso_bench.jsonl", "simulate_agentcgroup.jsonl", "router_seeds.json", "router_cliff.json"):
        assert any(older in " ".join(note.split()) for note in tables[name]["notes"])
