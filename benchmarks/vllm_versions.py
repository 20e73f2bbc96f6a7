"""The supported versions of vLLM, from the tests that `make test-next` ran on each: a result file and a reference page.

Without an argument it writes the page again from the kept results.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.results import DIRECTORY, kept_rows, save, vllm_version
from cluster.offline.reference.pages import code, page, table

NAME = "vllm_versions"
PAGE = DIRECTORY.parents[1] / "docs" / "reference" / "vllm.md"
INTRODUCTION = """\
Ray's LLM extra requires one version of vLLM, which is the default and the one that `make test` and CI use.
`make test-next` runs the contracts and the tests of a replica, with vLLM's real CPU engine, on newer versions too, each
in an environment of its own. These tests start no Ray cluster. A version is supported if none of them fails on it."""
LIMITS = """\
The versions between these have not been tested. `replicas/vllm_versions.py` has the differences between the versions.
To test another one, add a file with the packages that change to `requirements/vllm`.

vLLM 0.32 applies the schema of a tool's arguments only if the tool has `strict: true`. Without it, `tool_choice` with a
name or `required` may produce arguments that are no object."""
HEAD = ("vLLM", "supported", "tests passed", "failed", "skipped", "Ray", "torch", "transformers", "tested on")
PACKAGES = ("ray", "torch", "transformers")


def row_of(report: Path) -> dict[str, Any]:
    """Return the result of the tests in this environment, from pytest's JUnit report.

    Raises:
        ValueError: the report has no tests.
    """
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counted = [
        {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for suite in suites
    ]
    ran = {name: sum(suite[name] for suite in counted) for name in ("tests", "failures", "errors", "skipped")}
    if not ran["tests"]:
        raise ValueError(f"{report}: no test ran")
    failed = ran["failures"] + ran["errors"]
    return {
        "version": vllm_version(),
        "passed": ran["tests"] - failed - ran["skipped"],
        "failed": failed,
        "skipped": ran["skipped"],
        **{package: version(package).partition("+")[0] for package in PACKAGES},
        "on": ElementTree.parse(report).getroot().find("testsuite").get("timestamp", "")[:10],  # type: ignore[union-attr]
    }


def merged(rows: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows with the result of one version replaced, in the order of the versions."""
    others = [row for row in rows if row["version"] != new["version"]]
    return sorted([*others, new], key=lambda row: [int(part) for part in row["version"].split(".")[:3]])


def versions_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the reference page."""
    return page("vLLM versions", INTRODUCTION, table(HEAD, map(_cells, rows)), LIMITS)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (str(row[name]) for name in ("passed", "failed", "skipped"))
    return (code(row["version"]), "no" if row["failed"] else "yes", *counts, *(row[name] for name in (*PACKAGES, "on")))


def main(argv: Sequence[str] | None = None) -> int:
    """Record a report, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?", help="pytest's JUnit report of this environment's tests")
    arguments = parser.parse_args(argv)
    rows: Sequence[Mapping[str, Any]] = kept_rows(NAME)
    if arguments.report is not None:
        rows = merged(rows, row_of(arguments.report))
        save(NAME, rows)
    PAGE.write_text(versions_page(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
