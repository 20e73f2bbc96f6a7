"""A record in a file."""

from pathlib import Path

import pytest

from tests.report.recorded_runs import write_record


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write_record(tmp_path / "run.jsonl")
