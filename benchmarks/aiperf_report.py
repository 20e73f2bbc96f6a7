"""Reads the reports that AIPerf writes of one run: its summary, and its records of single requests.

A field that is missing, has another unit or is not known is an error that names the file and the field, so that a new
version of AIPerf is noticed and not misread.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

SCHEMA = "1.4"
"""Version of the summary's schema that is read here (AIPerf 0.13)."""
SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"


class ReportError(ValueError):
    """A report of AIPerf lacks a field, or has one that is not known. The message names the file and the field."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Metric(BaseModel):
    """A metric of the summary. It has more percentiles than are read here."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    unit: str
    avg: float | None = None
    p50: float | None = None
    p99: float | None = None


class Summary(BaseModel):
    """The summary. Its other keys are metrics and the run's configuration."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    schema_version: str
    aiperf_version: str
    is_complete: bool
    was_cancelled: bool
    request_count: _Metric
    request_throughput: _Metric
    output_token_throughput: _Metric
    time_to_first_token: _Metric
    inter_token_latency: _Metric
    request_latency: _Metric


class Metadata(_Strict):
    """What a record has of its request. Times are Unix time in nanoseconds."""

    session_num: int
    x_request_id: str
    x_correlation_id: str
    """The session's id, as it was sent in the session header."""
    conversation_id: str
    turn_index: int
    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str
    was_cancelled: bool
    worker_id: str
    record_processor_id: str
    credit_issued_ns: int | None = None
    request_ack_ns: int | None = None
    phase_index: int | None = None
    profiling_index: int | None = None
    phase_name: str | None = None
    phase_kind: str | None = None
    context_overflow_skip: bool = False
    cancellation_time_ns: int | None = None
    agent_depth: int = 0
    root_correlation_id: str | None = None
    parent_correlation_id: str | None = None


class Record(_Strict):
    """One request."""

    metadata: Metadata
    metrics: Mapping[str, Any]
    trace_data: Any = None
    spec_decode_acceptance: Any = None
    error: Any = None


UNITS = {
    "request_count": "requests",
    "request_throughput": "requests/sec",
    "output_token_throughput": "tokens/sec",
    "time_to_first_token": "ms",
    "inter_token_latency": "ms",
    "request_latency": "ms",
}
SHOWN = {
    "requests_per_s": ("request_throughput", "avg"),
    "tokens_per_s": ("output_token_throughput", "avg"),
    "ttft_p50_ms": ("time_to_first_token", "p50"),
    "ttft_p99_ms": ("time_to_first_token", "p99"),
    "itl_p50_ms": ("inter_token_latency", "p50"),
    "itl_p99_ms": ("inter_token_latency", "p99"),
}
"""The figures of a result, each with its metric and statistic of the summary."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """What became of the sessions of a run."""

    started: int
    completed: int
    """Those whose turns all ended without an error."""
    failed_requests: int
    duration_p50_s: float | None
    """Median seconds from the first request's start to the last one's end, pauses included, of those that completed."""


def read_report(directory: Path, turns: Mapping[str, int]) -> dict[str, Any]:
    """Read one run's reports.

    Args:
        directory: the folder that AIPerf wrote.
        turns: the number of turns of each session of the dataset, by its id.

    Returns:
        the figures of `SHOWN`, and of the sessions.

    Raises:
        ReportError: a report cannot be used; the message names the file and the field.
    """
    summary = _summary(directory / SUMMARY)
    found: dict[str, Any] = {"aiperf": summary.aiperf_version}
    for name, (metric, statistic) in SHOWN.items():
        value = getattr(getattr(summary, metric), statistic)
        if value is None:
            raise ReportError(f"{directory / SUMMARY}: {metric}.{statistic}: missing")
        found[name] = value
    sessions = sessions_of(_records(directory / RECORDS), turns, str(directory / RECORDS))
    return found | {
        "complete": summary.is_complete and not summary.was_cancelled,
        "requests": summary.request_count.avg,
        "sessions": sessions.started,
        "sessions_completed": sessions.completed,
        "failed_requests": sessions.failed_requests,
        "session_p50_s": sessions.duration_p50_s,
    }


def session_ids(directory: Path) -> list[str]:
    """Return the ids that one run's sessions had in the session header.

    Raises:
        ReportError: the records cannot be used; the message names the file, the line and the field.
    """
    return sorted({record.metadata.x_correlation_id for record in _records(directory / RECORDS)})


def sessions_of(records: Sequence[Record], turns: Mapping[str, int], where: str) -> Sessions:
    """Count the sessions of a run.

    Args:
        records: all requests of the run.
        turns: the number of turns of each session of the dataset, by its id.
        where: the name of the file of the records, for errors.

    Raises:
        ReportError: a record is of a session that the dataset does not have.
    """
    by_session: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.metadata.conversation_id not in turns:
            raise ReportError(
                f"{where}: metadata.conversation_id: {record.metadata.conversation_id!r} is not in the dataset"
            )
        by_session[record.metadata.x_correlation_id].append(record)
    durations: list[float] = []
    for of_one in by_session.values():
        done = {one.metadata.turn_index for one in of_one if one.error is None and not one.metadata.was_cancelled}
        if len(done) == turns[of_one[0].metadata.conversation_id]:
            begun_ns = min(one.metadata.request_start_ns for one in of_one)
            durations.append((max(one.metadata.request_end_ns for one in of_one) - begun_ns) / 1e9)
    failed = sum(record.error is not None for record in records)
    return Sessions(len(by_session), len(durations), failed, median(durations) if durations else None)


def _summary(path: Path) -> Summary:
    try:
        summary = Summary.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error}") from error
    except ValidationError as error:
        raise _named(str(path), error) from error
    if summary.schema_version != SCHEMA:
        raise ReportError(f"{path}: schema_version: {summary.schema_version}, but {SCHEMA} is the one that is known")
    for metric, unit in UNITS.items():
        given = getattr(summary, metric).unit
        if given != unit:
            raise ReportError(f"{path}: {metric}.unit: {given}, but it was {unit}")
    return summary


def _records(path: Path) -> list[Record]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            raise _named(f"{path}:{number}", error) from error
    return [record for record in records if record.metadata.benchmark_phase == "profiling"]


def _named(where: str, error: ValidationError) -> ReportError:
    first = error.errors(include_url=False, include_input=False)[0]
    return ReportError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}")
