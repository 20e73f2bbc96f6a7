"""Writes the results into docs/papers/NAME.md: ``python -m benchmarks.papers``.

``caesura reproduce NAME --json FILE`` makes the numbers, and ``python -m benchmarks.papers FILE ...`` keeps them in
``results/`` with the commit before it writes the pages. The files of several figures of one paper are joined. What
stands after `MARK` in a page is replaced, and so is what stands between `COUNTED` in docs/evidence.md.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from benchmarks.deviations import table_of
from benchmarks.results import commit
from cluster.offline.reproduce.comparison import Compared
from cluster.offline.reproduce.plan import PAPERS, Figure, Paper, Row, paper_of
from cluster.offline.reproduce.report import cells, summary

PAGES = Path(__file__).parents[1] / "docs" / "papers"
RESULTS = Path(__file__).parent / "results"
MARK = "<!-- Written by `python -m benchmarks.papers`. -->"
EVIDENCE = PAGES.parent / "evidence.md"
COUNTED = ("<!-- papers: -->", "<!-- :papers -->")
PLACE = ("measure", "system", "against", "load", "kind")
"""What makes a kept row and one of the plan the same. A label may be written in another way later."""


def main() -> int:
    """Keep the files that are named, and write all pages."""
    for file in sys.argv[1:]:
        keep(Path(file))
    for name in PAPERS:
        page = PAGES / f"{name}.md"
        page.write_text(with_results(name, page.read_text(encoding="utf-8")), encoding="utf-8")
    EVIDENCE.write_text(with_counts(EVIDENCE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def keep(file: Path) -> Path:
    """Write a result with the commit into `RESULTS`, by its paper and, if it has a single figure, its figure."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["command"] = re.sub(r"/\S*/", "", content["command"])  # folders of this machine
    figures = list(content["curves"])
    name = "_".join(["reproduce", content["paper"], *(figures if len(figures) == 1 else [])])
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"commit": commit(), **content}, indent=1) + "\n", encoding="utf-8")
    return path


def with_results(name: str, page: str) -> str:
    """Return the page with the results that are kept of a paper, and with the numbers that have none."""
    head = page.partition(MARK)[0].rstrip() + "\n"
    kept, plan = _kept(name), paper_of(name)
    rows = [row for one in kept for row in _rows(one, plan)]
    made = {row["figure"]: _made(one) for one in kept for row in one["rows"]}
    alike = f" {next(iter(made.values()))}" if len(set(made.values())) == 1 else ""
    lines = [
        "",
        MARK,
        "",
        *([*changes, ""] if (changes := table_of(name)) else []),
        "## Results beside the paper's",
        *(["", f"{summary(rows)}{alike}"] if rows else []),
    ]
    for figure in dict.fromkeys(row.figure for row in rows):
        lines += ["", *_table(plan.figures[figure], [row for row in rows if row.figure == figure])]
        lines += [] if alike else ["", made[figure]]
        lines += [f"\nNot here: {missing}" for missing in plan.figures[figure].missing]
    lines += [f"\nNot here: {missing}" for missing in plan.missing]
    lines += ["", *not_run] if (not_run := _not_run(plan, rows)) else []
    return head + "\n".join(lines) + "\n"


def with_counts(page: str) -> str:
    """Return the page of evidence with the number of published numbers that are near ours, the smaller count first.

    Raises:
        ValueError: the page has no place for it.
    """
    rows = [row for name in PAPERS for one in _kept(name) for row in _rows(one, paper_of(name))]
    counts = sorted(
        (
            (sum(row.near_by_rest for row in rows), "if a reduction in percent is compared by what it leaves"),
            (sum(row.near for row in rows), "if the percents are compared"),
        ),
        key=lambda count: count[0],
    )
    text = ", ".join(f"{count} {how}" for count, how in counts)
    begin, end = COUNTED
    head, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"{EVIDENCE} has no place for the counts between {begin} and {end}")
    return f"{head}{begin}of {len(rows)} published numbers, within 25 %: {text}{end}{rest.partition(end)[2]}"


def _kept(name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in files_of(name)]


def _not_run(plan: Paper, rows: Sequence[Compared]) -> list[str]:
    """Return a list of the planned numbers without a result."""
    known = {(row.figure, row.what) for row in rows}
    missing = {
        figure.title: [row.what for row in figure.rows if (key, row.what) not in known]
        for key, figure in plan.figures.items()
    }
    lines = [f"- {title}: {len(whats)} numbers ({'; '.join(whats)})" for title, whats in missing.items() if whats]
    return ["Planned, and not run yet:", "", *lines] if lines else []


def files_of(name: str) -> list[Path]:
    """Return the kept results of a paper, in the order of its figures."""
    order = {figure: number for number, figure in enumerate(paper_of(name).figures)}
    found = [path for path in RESULTS.glob(f"reproduce_{name}*.json") if path.stem.split("_")[1] == name]
    return sorted(found, key=lambda path: order.get(path.stem.removeprefix(f"reproduce_{name}_"), -1))


def _rows(kept: Mapping[str, Any], plan: Paper) -> Iterator[Compared]:
    """Yield the rows of a kept result, with the label and the kind that the plan has for them now."""
    for row in kept["rows"]:
        labels = {one["what"] for one in kept["rows"] if one["figure"] == row["figure"]}
        planned = planned_of(row, plan.figures[row["figure"]].rows, labels)
        fields = {key: value for key, value in row.items() if key not in ("ratio", "near", "near_by_rest")}
        named = {} if planned is None else {"what": planned.what, "kind": planned.kind}
        yield Compared(**{"kind": "value", **fields, **named})


def planned_of(kept: Mapping[str, Any], rows: Sequence[Row], labels: Set[str]) -> Row | None:
    """Return the row of the plan that a kept row is of; None: there is none.

    Args:
        kept: the row. Older ones have none of `PLACE`: they are known by their label, or if it has changed, by the
            published number.
        rows: of the same figure of the plan.
        labels: of all kept rows of that figure.
    """
    if kept.get("measure") is not None:
        found = [row for row in rows if all(getattr(row, name) == kept.get(name) for name in PLACE)]
    elif not (found := [row for row in rows if row.what == kept["what"]]):
        found = [row for row in rows if row.published == kept["published"] and row.what not in labels]
    return found[0] if len(found) == 1 else None


def _made(kept: Mapping[str, Any]) -> str:
    return f"Seeds {', '.join(map(str, kept['seeds']))}; {kept['date']}, commit {kept['commit']}."


def _table(figure: Figure, rows: Sequence[Compared]) -> list[str]:
    ran = [key for key in figure.factors if any(row.with_factors.get(key) is not None for row in rows)]
    names = ["published", "here", "ratio", *(figure.factors[key].what for key in ran)]
    lines = [f"### {figure.title}", "", f"| | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
    return [*lines, *(f"| {' | '.join(cells(row, ran))} |" for row in rows)]


if __name__ == "__main__":
    sys.exit(main())
