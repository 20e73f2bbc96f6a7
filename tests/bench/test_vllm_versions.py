"""The table of vLLM versions, from pytest's report to the page."""

from pathlib import Path

import pytest

from benchmarks.results import kept_rows, vllm_version
from benchmarks.vllm_versions import NAME, PAGE, merged, row_of, versions_page


def report_of(folder: Path, tests: int, failures: int, errors: int, skipped: int) -> Path:
    path = folder / "report.xml"
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
    path.write_text(f'<testsuites><testsuite {counts} timestamp="2026-11-28T03:00:00" /></testsuites>')
    return path


def test_a_report_is_counted(tmp_path: Path) -> None:
    row = row_of(report_of(tmp_path, 20, 2, 1, 3))
    assert (row["version"], row["passed"], row["failed"], row["skipped"]) == (vllm_version(), 14, 3, 3)
    assert row["on"] == "2026-11-28"


def test_a_report_without_tests_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no test ran"):
        row_of(report_of(tmp_path, 0, 0, 0, 0))


def test_a_new_result_replaces_that_of_its_version_in_the_order_of_versions(tmp_path: Path) -> None:
    row = row_of(report_of(tmp_path, 5, 0, 0, 0))
    rows = merged(
        [{**row, "version": "0.9.0"}, {**row, "version": "0.32.0", "passed": 1}], {**row, "version": "0.32.0"}
    )
    assert [(one["version"], one["passed"]) for one in rows] == [("0.9.0", 5), ("0.32.0", 5)]


def test_a_version_with_failed_tests_is_not_supported(tmp_path: Path) -> None:
    page = versions_page([row_of(report_of(tmp_path, 5, 1, 0, 0))])
    assert f"| `{vllm_version()}` | no | 4 | 1 |" in page


def test_the_page_is_that_of_the_kept_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == versions_page(kept_rows(NAME))
