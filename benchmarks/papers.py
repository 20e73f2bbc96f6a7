"""Writes the results into docs/papers/NAME.md: ``python -m benchmarks.papers``.

``caesura reproduce NAME --json FILE`` makes the numbers, and ``python -m benchmarks.papers FILE ...`` keeps them in
``results/`` with the commit before it writes the pages. The files of several figures of one paper are joined. What
stands after `MARK` in a page is replaced.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import commit
from cluster.offline.reproduce.comparison import Compared
from cluster.offline.reproduce.plan import PAPERS, paper_of
from cluster.offline.reproduce.report import cells, summary

PAGES = Path(__file__).parents[1] / "docs" / "papers"
RESULTS = Path(__file__).parent / "results"
MARK = "<!-- Written by `python -m benchmarks.papers`. -->"


def main() -> int:
    """Keep the files that are named, and write all pages."""
    for file in sys.argv[1:]:
        keep(Path(file))
    for name in PAPERS:
        page = PAGES / f"{name}.md"
        page.write_text(with_results(name, page.read_text(encoding="utf-8")), encoding="utf-8")
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
    """Return the page with the results that are kept of a paper; without them if there are none."""
    head = page.partition(MARK)[0].rstrip() + "\n"
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in files_of(name)]
    if not kept:
        return head
    rows = [_row(row) for one in kept for row in one["rows"]]
    made = {row["figure"]: _made(one) for one in kept for row in one["rows"]}
    alike = f" {next(iter(made.values()))}" if len(set(made.values())) == 1 else ""
    lines = ["", MARK, "", "## Results beside the paper's", "", f"{summary(rows)}{alike}"]
    plan = paper_of(name)
    for figure in dict.fromkeys(row.figure for row in rows):
        lines += ["", *_table(plan.figures[figure].title, [row for row in rows if row.figure == figure])]
        lines += [] if alike else ["", made[figure]]
        lines += [f"\nNot here: {missing}" for missing in plan.figures[figure].missing]
    lines += [f"\nNot here: {missing}" for missing in plan.missing]
    return head + "\n".join(lines) + "\n"


def files_of(name: str) -> list[Path]:
    """Return the kept results of a paper, in the order of its figures."""
    order = {figure: number for number, figure in enumerate(paper_of(name).figures)}
    found = [path for path in RESULTS.glob(f"reproduce_{name}*.json") if path.stem.split("_")[1] == name]
    return sorted(found, key=lambda path: order.get(path.stem.removeprefix(f"reproduce_{name}_"), -1))


def _row(row: Mapping[str, Any]) -> Compared:
    return Compared(**{key: value for key, value in row.items() if key not in ("ratio", "near")})


def _made(kept: Mapping[str, Any]) -> str:
    return f"Seeds {', '.join(map(str, kept['seeds']))}; {kept['date']}, commit {kept['commit']}."


def _table(title: str, rows: Sequence[Compared]) -> list[str]:
    lines = [f"### {title}", "", "| | published | here | ratio |", "| --- | --- | --- | --- |"]
    return lines + [f"| {' | '.join(cells(row, factors=False))} |" for row in rows]


if __name__ == "__main__":
    sys.exit(main())
