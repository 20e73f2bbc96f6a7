"""`caesura tools`: the tools of a server, and how long they take."""

from typing import Annotated, Any

import typer

from cluster.commands.asking import DEFAULT_URL, Url, asked

QUANTILES = ("p50_s", "p90_s", "p99_s")


def tools(
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="As the server tells it.")] = False,
) -> None:
    """The tools that a server runs for its programs, with their run times and waits in seconds (p50, p90, p99)."""
    from rich.console import Console
    from rich.table import Table

    told = asked("GET", url, "/v1/tools")
    if json:
        import json as writer

        typer.echo(writer.dumps(told, indent=2))
        return
    table = Table("tool", "of", "calls", "ran", "waited")
    for row in rows(told):
        table.add_row(*row)
    Console(highlight=False).print(table)


def rows(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each tool and each class of its calls, and one for all calls."""
    found: list[tuple[str, ...]] = []
    for tool in told["data"]:
        durations = {each["name"]: each for each in tool["durations"]}
        if not durations:
            found.append((tool["name"], tool["owner"], "0", "", ""))
        found += [(name, tool["owner"], *_cells(each)) for name, each in durations.items()]
    if told["overall"] is not None:
        found.append(("all tools", "", *_cells(told["overall"])))
    return found


def _cells(duration: dict[str, Any]) -> tuple[str, str, str]:
    run, queue = duration["run"], duration["queue"]
    return str((run or queue)["count"]), _spread(run), _spread(queue)


def _spread(spread: dict[str, float] | None) -> str:
    return "" if spread is None else "  ".join(f"{spread[name]:.3f}" for name in QUANTILES)
