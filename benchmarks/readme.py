"""Writes benchmarks/README.md from the kept results: ``python -m benchmarks.readme``.

`kept.yaml` has the page's text, and names the rows and fields of each file in `results/` that the page shows.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import simulated_command

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
RESULTS = HERE / "results"

Row = Mapping[str, Any]

REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "mean": statistics.fmean,
}


class KeptError(ValueError):
    """`kept.yaml` asks a result for something that it does not have."""


def main() -> int:
    """Write the page; with ``--check`` only compare it (exit status 1 if it is not current)."""
    page = render()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


def render() -> str:
    """The page.

    Raises:
        KeptError: an entry of `kept.yaml` matches no row, or names a field that the rows lack.
    """
    kept = yaml.safe_load((HERE / "kept.yaml").read_text())
    lines = [
        kept["head"],
        "## Micro-benchmarks",
        "",
        "| what | measured | command | date, commit |",
        "| --- | --- | --- | --- |",
    ]
    lines += [_figures(entry) for entry in kept["figures"]]
    lines.append(kept["simulated"].rstrip())
    for entry in kept["tables"]:
        lines += ["", *_table(entry)]
    lines.append(kept["faults"].rstrip())
    lines += [_promises(name) for name in ("faults", "soak")]
    return "\n".join(lines) + "\n"


def _figures(entry: Row) -> str:
    record = _record(entry)
    figures = []
    for figure in entry["figures"]:
        values = [
            value
            for row in _matching(entry, record["rows"], figure["where"])
            for value in _values(row, figure["field"])
        ]
        if not values:
            raise KeptError(f"{entry['file']}: no row has {figure['field']} where {figure['where']}")
        figures.append(figure["text"].format(number(REDUCE[figure.get("reduce", "mean")](values))))
    return f"| {entry['title']} | {', '.join(figures)} | `{record['command']}` | {record['date']}, {record['commit']} |"


def _table(entry: Row) -> list[str]:
    record = _record(entry)
    rows = _matching(entry, record["rows"], entry.get("where", {}))
    group, across, columns = entry["group"], entry.get("across"), entry["columns"]
    steps: list[Any] = entry.get("steps") or (sorted({_step(row, across) for row in rows}) if across else [None])
    head = [*group, *(f"{text} {number(step)}" if across else text for text in columns.values() for step in steps)]
    table = [f"| {' | '.join(head)} |", "| " + " | ".join("---" for _ in head) + " |"]
    keys = dict.fromkeys(tuple(row[name] for name in group) for row in rows if all(name in row for name in group))
    for key in keys:
        cells = [f"`{part}`" for part in key]
        for field in columns:
            for step in steps:
                of = [row for row in rows if all(row.get(n) == v for n, v in zip(group, key, strict=True))]
                of = [row for row in of if across is None or _step(row, across) == step]
                values = [value for row in of for value in _values(row, field)]
                cells.append(_cell(values, len({row.get("seed") for row in of})))
        table.append(f"| {' | '.join(cells)} |")
    said = " ".join(part.strip() for part in (entry.get("text", ""), *entry.get("notes", ())) if part)
    text = [said, ""] if said else []
    file = entry["file"]
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows if "seed" in row})))
    made = _origin(entry, record) + (f", seeds {seeds}" if seeds else "")
    source = f"`{record['command']}`, {made}, `results/{file}`"
    return [f"### {entry['title']}", "", *text, *table, "", source]


def _step(row: Row, across: str) -> float:
    """The value by which the columns of a table differ."""
    [value] = _values(row, across)
    return value


def _cell(values: Sequence[float], seeds: int) -> str:
    """The mean, and over several seeds their standard deviation."""
    if not values:
        return ""
    mean = number(statistics.fmean(values))
    if not 1 < seeds == len(values):
        return mean
    deviation = statistics.stdev(values)
    return f"{mean} ± {deviation:.0f}" if deviation >= 100 else f"{mean} ± {deviation:.2g}"


def _promises(name: str) -> str:
    rows = [line.split("|") for line in (RESULTS / f"{name}.md").read_text().splitlines()[2:]]
    kept = sum(row[-3].strip() == "yes" for row in rows)
    return f"| `make {name}` | {len(rows)} | {kept} | `results/{name}.md` |"


def _record(entry: Row) -> dict[str, Any]:
    """A result's rows, command, date and commit; what the file does not say stands in `kept.yaml`.

    Raises:
        KeptError: something is missing, or rows are of several commits and `kept.yaml` does not say which.
    """
    path = RESULTS / entry["file"]
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        made = {key: rows[0][key] for key in ("date", "commit") if key in rows[0]}
        made |= {"command": simulated_command(rows)} if "command" in rows[0] else {}
        record: dict[str, Any] = {"rows": rows, **made}
    else:
        record = json.loads(path.read_text())
    named = {key: entry[key] for key in ("command", "date", "commit") if key in entry}
    merged = named | record | ({"command": entry["command"]} if "command" in entry else {})
    _check_commits(entry, merged["rows"], each=path.suffix == ".jsonl")
    known = {"command", "rows"} if "commits" in entry else {"command", "date", "commit", "rows"}
    missing = known - set(merged)
    if missing:
        raise KeptError(f"{entry['file']}: neither it nor kept.yaml has {', '.join(sorted(missing))}")
    return merged


def _check_commits(entry: Row, rows: Sequence[Row], *, each: bool) -> None:
    """Raise KeptError unless all rows are of one commit, or each is of the one that `kept.yaml` names for its policy.

    Args:
        entry: of `kept.yaml`. Its ``commits`` are those of the rows of some policies.
        rows: of the file.
        each: whether every row has to name its commit, since the file itself names none.
    """
    if "commits" in entry:
        for row in rows:
            named = [one["commit"] for one in entry["commits"] if row["policy"] in one["policies"]]
            if len(named) != 1 or row.get("commit", named[0]) != named[0]:
                raise KeptError(f"{entry['file']}: kept.yaml has not the one commit of a row of {row['policy']}")
        return
    found = dict.fromkeys(row.get("commit") for row in rows if each or "commit" in row)
    if len(found) > 1 or None in found:
        commits = ", ".join("none" if commit is None else commit for commit in found)
        raise KeptError(f"{entry['file']}: its rows have the commits {commits}; name them in kept.yaml (commits)")


def _origin(entry: Row, record: Row) -> str:
    """The date and the commit, or those of each policy's rows."""
    if "commits" not in entry:
        return f"{record['date']}, commit {record['commit']}"
    return "rows of several commits: " + "; ".join(
        f"{one['date']}, {one['commit']} ({', '.join(f'`{policy}`' for policy in one['policies'])})"
        for one in entry["commits"]
    )


def _matching(entry: Row, rows: Iterable[Row], where: Row) -> list[Row]:
    found = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    if not found:
        raise KeptError(f"{entry['file']}: no row matches {dict(where)}")
    return found


def _values(row: Row, field: str) -> Sequence[float]:
    """The numbers under a dotted field of one row: none, one, or a list's. ``A/B`` is a quotient."""
    if "/" in field:
        above, below = (_values(row, part) for part in field.split("/"))
        return [value / by for value, by in zip(above, below, strict=True)]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return []
        value = value[name]
    return value if isinstance(value, list) else [value]


def number(value: float) -> str:
    """A number with three significant digits; whole numbers and those from 100 on without decimals."""
    if isinstance(value, int) or float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
