"""`caesura programs`: list a server's programs and tools, and show the history of a program."""

from datetime import UTC, datetime
from json import dumps
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cluster.offline.commands._common import DEFAULT_URL, Url, send, send_for_text
from cluster.offline.commands.records import export

app = typer.Typer(no_args_is_help=True, help="Look at agent programs on a running server.")


@app.command("list")
def list_programs(
    url: Url = DEFAULT_URL,
    limit: int = 20,
    after: Annotated[str | None, typer.Option(help="The last program of the page before.")] = None,
) -> None:
    """Programs of clients and of the server, those seen last first."""
    from rich.console import Console
    from rich.table import Table

    from cluster.offline.bench.terminal import print_table

    query = {"limit": limit} | ({} if after is None else {"after": after})
    answer = send("GET", url, "/v1/programs", query)
    table = Table("program", "status", "state", "turns", "cached", "last seen", "replica", "runs", "model", "last run")
    for program in answer["data"]:
        table.add_row(*list_cells(program))
    print_table(table, Console(highlight=False))
    if answer.get("missing_replicas"):
        typer.echo(f"{answer['missing_replicas']} replicas did not answer; their programs are missing", err=True)
    if answer.get("has_more") and answer.get("last_id"):
        typer.echo(f"There are more: --after {answer['last_id']}", err=True)


def list_cells(program: dict[str, Any]) -> tuple[str, ...]:
    """Return a program's row of the list. A value that the server does not know is a dash."""
    share, seen_s = program.get("cached_share"), program.get("last_seen_at")
    cells = {
        **{key: program.get(key) for key in ("id", "status", "state", "turns")},
        "cached": None if share is None else f"{share:.0%}",
        "seen": None if seen_s is None else datetime.fromtimestamp(seen_s, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        **{key: program.get(key) for key in ("replica", "runs", "model", "last_run")},
    }
    return tuple("-" if cell is None else str(cell) for cell in cells.values())


@app.command()
def show(
    program_id: str,
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="As the server returns it.")] = False,
) -> None:
    """The history of a program: turns, pauses, what was held, swapped or released, and why."""
    answer = send("GET", url, f"/v1/programs/{quote(program_id)}")
    if json:
        typer.echo(dumps(answer, indent=2))
        return
    for line in history_lines(answer):
        typer.echo(line)


app.command()(export)


@app.command()
def usage(
    url: Url = DEFAULT_URL,
    day: Annotated[str | None, typer.Option(help="The day in UTC, YYYY-MM-DD. Today if it is missing.")] = None,
) -> None:
    """What each program used in a day, as CSV: turns, tokens and seconds of GPUs. The server keeps a week."""
    typer.echo(send_for_text("GET", url, "/admin/usage", {} if day is None else {"day": day}), nl=False)


@app.command()
def cancel(program_id: str, url: Url = DEFAULT_URL) -> None:
    """End a program's runs on the server."""
    answer = send("POST", url, f"/v1/programs/{quote(program_id)}/cancel")
    typer.echo(f"cancelled: {', '.join(answer['cancelled']) or 'nothing was open'}")


def history_lines(answer: dict[str, Any]) -> list[str]:
    """Format the server's report of a program as lines. Times count from the program's first turn."""
    lines = [f"program {answer['id']}" + (f", {answer['phase']} on its replica" if "phase" in answer else "")]
    begun_s = answer.get("arrived_s", 0.0)
    if answer.get("turns"):
        lines.append("turns, as the replica saw them:")
    for number, turn in enumerate(answer.get("turns", []), 1):
        reused = f"{turn['cached_tokens']} of {turn['prompt_tokens']} prompt tokens reused"
        if turn.get("disk_tokens"):
            reused += f" ({turn['disk_tokens']} loaded from disk)"
        lines.append(
            f"  {turn['arrived_s'] - begun_s:9.3f} s  turn {number}: waited {turn['queue_s']:.3f} s, ran"
            f" {turn['run_s']:.3f} s, {reused}, {turn['output_tokens']} generated"
        )
        tools = f"asks for {', '.join(turn['tools'])}; " if turn["tools"] else ""
        lines.append(f"{'':13}  {tools}{turn['decision']}")
    if answer.get("events"):
        lines.append("what became of it between its turns:")
    lines += [f"  {event['at_s'] - begun_s:9.3f} s  {event['event']}" for event in answer.get("events", [])]
    for run in answer.get("runs", []):
        lines += _run_lines(run)
    return lines


def _run_lines(run: dict[str, Any]) -> list[str]:
    why = f" ({run['reason']})" if run.get("reason") else ""
    taken = f", {run['runners']} runners" if run["runners"] > 1 else ""
    lines = [f"run {run['id']} on the server: {run['status']}{why}{taken}"]
    for turn in run["turns"]:
        lines.append(
            f"  {turn['began_s']:9.3f} s  turn {turn['turn']}, {turn['rendering']}: {turn['output_tokens']} tokens in"
            f" {turn['ended_s'] - turn['began_s']:.3f} s"
        )
        for call in turn["calls"]:
            ran = f" after {call['queue_s']:.3f} s in its queue, ran {call['run_s']:.3f} s" if "run_s" in call else ""
            lines.append(f"{'':13}  {call['name']}: {call['outcome'] or 'not run here'}{ran}")
    return lines


QUANTILES = ("p50_s", "p90_s", "p99_s")


def tools(
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="As the server returns it.")] = False,
) -> None:
    """The tools that a server runs for its programs, with their run times and waits in seconds (p50, p90, p99)."""
    from rich.console import Console
    from rich.table import Table

    from cluster.offline.bench.terminal import print_table

    answer = send("GET", url, "/v1/tools")
    if json:
        typer.echo(dumps(answer, indent=2))
        return
    table = Table("tool", "of", "calls", "ran", "waited")
    for row in rows(answer):
        table.add_row(*row)
    print_table(table, Console(highlight=False))


def rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each tool and each class of its calls, and one for all calls."""
    found: list[tuple[str, ...]] = []
    for tool in answer["data"]:
        durations = {each["name"]: each for each in tool["durations"]}
        if tool.get("unusable") is not None:
            found.append((tool["name"], tool["owner"], "unusable", tool["unusable"], ""))
        elif not durations:
            found.append((tool["name"], tool["owner"], "0", "", ""))
        found += [(name, tool["owner"], *_cells(each)) for name, each in durations.items()]
    if answer["overall"] is not None:
        found.append(("all tools", "", *_cells(answer["overall"])))
    return found


def _cells(duration: dict[str, Any]) -> tuple[str, str, str]:
    run, queue = duration["run"], duration["queue"]
    return str((run or queue)["count"]), _spread(run), _spread(queue)


def _spread(spread: dict[str, float] | None) -> str:
    return "" if spread is None else "  ".join(f"{spread[name]:.3f}" for name in QUANTILES)
