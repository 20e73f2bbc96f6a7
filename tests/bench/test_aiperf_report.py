"""AIPerf's reports of a run are read strictly: a field that is missing or unknown is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aiperf_report import RECORDS, SUMMARY, ReportError, read_report, session_ids

TURNS = {"a": 2, "b": 1}
UNITS = {
    "request_count": "requests",
    "request_throughput": "requests/sec",
    "output_token_throughput": "tokens/sec",
    "time_to_first_token": "ms",
    "inter_token_latency": "ms",
    "request_latency": "ms",
}


def summary(**changes: Any) -> dict[str, Any]:
    metrics = {name: {"unit": unit, "avg": 3.0, "p50": 2.0, "p99": 9.0, "std": 1.0} for name, unit in UNITS.items()}
    head = {"schema_version": "1.4", "aiperf_version": "0.13.0", "is_complete": True, "was_cancelled": False}
    return {**head, **metrics, "input_config": {}, **changes}


def record(session: str, turn: int, start: float, end: float, *, of: str = "a", **changes: Any) -> dict[str, Any]:
    metadata = {
        "session_num": 0,
        "x_request_id": "r",
        "x_correlation_id": session,
        "conversation_id": of,
        "turn_index": turn,
        "request_start_ns": int(start * 1e9),
        "request_end_ns": int(end * 1e9),
        "benchmark_phase": "profiling",
        "was_cancelled": False,
        "worker_id": "w",
        "record_processor_id": "p",
    }
    metadata |= changes.pop("metadata", {})
    return {"metadata": {key: value for key, value in metadata.items() if value != "absent"}, "metrics": {}, **changes}


RECORDED = (
    record("s1", 0, 1, 2),
    record("s1", 1, 5, 8),
    record("s2", 0, 1, 3),
    record("s2", 1, 4, 5, error={"code": 500}),
    record("s3", 0, 2, 3, of="b"),
    record("s0", 0, 2, 3, of="b", metadata={"benchmark_phase": "warmup"}),
)


def report(directory: Path, *records: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given = {key: value for key, value in summary(**changes).items() if value != "absent"}
    (directory / SUMMARY).write_text(json.dumps(given))
    (directory / RECORDS).write_text("".join(json.dumps(one) + "\n" for one in records))
    return read_report(directory, TURNS)


def test_sessions_complete_when_all_their_turns_do(tmp_path: Path) -> None:
    found = report(tmp_path, *RECORDED)
    assert found == {
        "aiperf": "0.13.0",
        "requests_per_s": 3.0,
        "tokens_per_s": 3.0,
        "ttft_p50_ms": 2.0,
        "ttft_p99_ms": 9.0,
        "itl_p50_ms": 2.0,
        "itl_p99_ms": 9.0,
        "complete": True,
        "requests": 3.0,
        "sessions": 3,
        "sessions_completed": 2,
        "failed_requests": 1,
        "session_p50_s": 4.0,
    }
    assert session_ids(tmp_path) == ["s1", "s2", "s3"]
    assert not report(tmp_path, *RECORDED, was_cancelled=True)["complete"]
    unfinished = report(tmp_path, RECORDED[2], is_complete=False)
    assert (unfinished["complete"], unfinished["sessions_completed"], unfinished["session_p50_s"]) == (False, 0, None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"schema_version": "2.0"}, "schema_version"),
        ({"is_complete": None}, "is_complete"),
        ({"time_to_first_token": "absent"}, "time_to_first_token"),
        ({"time_to_first_token": {"unit": "s", "p50": 1.0, "p99": 1.0}}, "time_to_first_token.unit"),
        ({"inter_token_latency": {"unit": "ms", "avg": 1.0}}, "inter_token_latency.p50"),
        ({"request_throughput": {"avg": 1.0}}, "request_throughput.unit"),
    ],
)
def test_a_field_of_the_summary_is_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ReportError) as error:
        report(tmp_path, *RECORDED, **changes)
    assert str(error.value).startswith(f"{tmp_path / SUMMARY}: {field}: ")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"metadata": {"x_correlation_id": "absent"}}, "metadata.x_correlation_id"),
        ({"metadata": {"turn_index": None}}, "metadata.turn_index"),
        ({"metadata": {"new_in_a_later_version": 1}}, "metadata.new_in_a_later_version"),
        ({"new_in_a_later_version": 1}, "new_in_a_later_version"),
    ],
)
def test_a_field_of_a_record_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ReportError) as error:
        report(tmp_path, RECORDED[0], record("s1", 1, 5, 8, **changes))
    assert str(error.value).startswith(f"{tmp_path / RECORDS}:2: {field}: ")


def test_a_session_that_the_dataset_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"metadata.conversation_id: 'c' is not in the dataset"):
        report(tmp_path, record("s1", 0, 1, 2, of="c"))


def test_a_report_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=f"{SUMMARY}: cannot be read"):
        read_report(tmp_path, TURNS)
