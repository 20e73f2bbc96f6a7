"""`caesura programs`: what runs on a server, and the story of a program."""

from typing import Annotated, Any

import typer

from cluster.commands.asking import DEFAULT_URL, Url, asked

app = typer.Typer(no_args_is_help=True, help="Look at agent programs on a running server.")


@app.command("list")
def list_programs(url: Url = DEFAULT_URL, limit: int = 20) -> None:
    """Programs that ran on the server, those begun last first."""
    from rich.console import Console
    from rich.table import Table

    table = Table("program", "status", "runs", "model", "last run")
    for program in asked("GET", url, "/v1/programs", {"limit": limit})["data"]:
        cells = (program["id"], program["status"], program["runs"], program["model"], program["last_run"])
        table.add_row(*(str(cell) for cell in cells))
    Console(highlight=False).print(table)


@app.command()
def show(
    program_id: str,
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="As the server tells it.")] = False,
) -> None:
    """The story of a program: turns, pauses, what was held, swapped or released, and why."""
    from urllib.parse import quote

    told = asked("GET", url, f"/v1/programs/{quote(program_id)}")
    if json:
        import json as writer

        typer.echo(writer.dumps(told, indent=2))
        return
    for line in story_lines(told):
        typer.echo(line)


@app.command()
def cancel(program_id: str, url: Url = DEFAULT_URL) -> None:
    """End a program's runs on the server."""
    from urllib.parse import quote

    told = asked("POST", url, f"/v1/programs/{quote(program_id)}/cancel")
    typer.echo(f"cancelled: {', '.join(told['cancelled']) or 'nothing was open'}")


def story_lines(told: dict[str, Any]) -> list[str]:
    """What the server tells of a program, for people. Times count from the program's first turn."""
    lines = [f"program {told['id']}" + (f", {told['phase']} on its replica" if "phase" in told else "")]
    begun_s = told.get("arrived_s", 0.0)
    if told.get("turns"):
        lines.append("turns, as the replica saw them:")
    for number, turn in enumerate(told.get("turns", []), 1):
        reused = f"{turn['cached_tokens']} of {turn['prompt_tokens']} prompt tokens reused"
        lines.append(
            f"  {turn['arrived_s'] - begun_s:9.3f} s  turn {number}: waited {turn['queue_s']:.3f} s, ran"
            f" {turn['run_s']:.3f} s, {reused}, {turn['output_tokens']} generated"
        )
        asked = f"asks for {', '.join(turn['tools'])}; " if turn["tools"] else ""
        lines.append(f"{'':13}  {asked}{turn['decision']}")
    if told.get("events"):
        lines.append("what became of it between its turns:")
    lines += [f"  {event['at_s'] - begun_s:9.3f} s  {event['event']}" for event in told.get("events", [])]
    for run in told.get("runs", []):
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
