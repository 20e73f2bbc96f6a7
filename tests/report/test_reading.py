"""Records and summaries are read back as they were written, and junk is complained of by file and line."""

import json
from pathlib import Path

import pytest

from cluster.core.errors import ConfigError
from cluster.offline.bench.record import write
from cluster.offline.report.page import decided
from cluster.offline.report.plots import focus
from cluster.offline.report.reading import Column, read
from tests.report.recorded_runs import POLICIES, PROGRAMS, RATES, lines, run_line, summary


def result_line(policy: str, rate: float, **more: object) -> str:
    return json.dumps(
        {"policy": policy, "preset": "live/tiny", "rate": rate, "seed": 0, **summary(policy, rate)} | more
    )


def test_a_record_is_read_as_it_was_written(record: Path) -> None:
    runs = read([record])
    assert [(run.head.rate, run.head.policy) for run in runs.runs] == [(r, p) for r in RATES for p in POLICIES]
    assert [run.head for run in runs.runs] == [line for line in lines() if hasattr(line, "policy")]
    assert all(len(run.programs) == PROGRAMS and len(run.memory) == 35 for run in runs.runs)
    ours = Column("caesura", "", "live/tiny")
    assert runs.mean(ours, 2.0, "goodput_programs") == 2.0
    assert runs.mean(ours, 2.0, "fetched_tokens") is None


def test_of_a_summary_there_are_the_numbers_only(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{result_line('vllm', 1.0)}\n\n{result_line('caesura', 1.0)}\n")
    runs = read([path])
    assert list(runs.columns.values()) == ["vllm", "caesura"]
    assert not any(run.programs or run.memory for run in runs.runs)


def test_a_run_that_is_in_both_counts_once(record: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = run_line(0, "caesura", 2.0).command
    path.write_text("".join(f"{result_line('caesura', rate, command=command)}\n" for rate in (2.0, 3.0)))
    runs = read([record, path])
    assert len(runs.runs) == len(RATES) * len(POLICIES) + 1
    assert runs.rates == [1.0, 2.0, 3.0]
    assert not any(column.variant for column in runs.columns)


def test_runs_of_the_same_with_other_settings_are_columns_of_their_own(record: Path, tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).write_text(f"{result_line('caesura', 2.0, command=f'simulate {name}')}\n")
    runs = read([tmp_path / "small", tmp_path / "large"])
    assert list(runs.columns.values()) == ["caesura, small", "caesura, large"]
    assert list(read([record, tmp_path / "small"]).columns.values()) == [
        *("vllm", f"caesura, {record.name}", "caesura, small"),
    ]


def test_seeds_in_several_files_are_one_column(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / f"{seed}").write_text(f"{result_line('caesura', 2.0, seed=seed, command=f'simulate {seed}')}\n")
    assert list(read([tmp_path / "0", tmp_path / "1"]).columns.values()) == ["caesura"]


def test_columns_say_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    replicas = {"simulation": {"replicas": 4, "slo": {}}}
    told = [result_line("caesura", 1.0, router=name, **replicas) for name in ("caesura", "session_sticky")]
    path.write_text("\n".join(told))
    assert list(read([path]).columns.values()) == ["caesura, caesura", "caesura, session_sticky"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no run"),
        ("not json\n", "line 1"),
        ("[1]\n", "line 1"),
        ('{"a": 1}\n', "line 1"),
        ('{"line":"program","run":7,"program":"a","arrival_s":1,"outcome":"ok","good":true}\n', "run 7"),
        ('{"line":"memory","run":"x"}\n', "line 1"),
        ('{"line":"other"}\n', "line 1"),
    ],
)
def test_junk_is_complained_of(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "junk.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read([path])


def test_a_file_that_is_not_there_is_complained_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        read([tmp_path / "nowhere.jsonl"])


def test_the_load_in_focus_is_where_policies_differ_most(record: Path, tmp_path: Path) -> None:
    assert focus(read([record])) == 2.0
    # Where nothing was recorded, there is nothing to look at more closely.
    path = tmp_path / "results.jsonl"
    path.write_text(f"{result_line('vllm', 9.0)}\n{result_line('caesura', 9.0)}\n")
    assert focus(read([record, path])) == 2.0


def test_decisions_are_counted_with_their_reasons(record: Path) -> None:
    runs = read([record])
    found = decided(runs.of(Column("caesura", "", "live/tiny"), 2.0))
    assert found is not None
    assert found.total == PROGRAMS
    assert found.reasons == (("held", "pays", PROGRAMS, 100.0),)
    assert found.held_ended == (("expired", 100.0),)
    assert decided(runs.of(Column("vllm", "", "live/tiny"), 2.0)) is None


def test_runs_can_be_written_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    everything = list(lines())
    write(everything[:50], path)
    write(everything[50:], path, more=True)
    assert len(read([path]).runs) == len(RATES) * len(POLICIES)
