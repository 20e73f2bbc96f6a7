"""`caesura dashboards`: writes Grafana's dashboards and Prometheus' rules, and pushes the dashboards to a Grafana."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cluster.offline.commands._common import writing

app = typer.Typer(no_args_is_help=True)

EXTRA = ("grafana_client", "grafana_foundation_sdk")
INSTALL = "install the extra `dashboards`, as the README says under Dashboards and alerts"

DIFFERENT = 1
REFUSED = 2

Url = Annotated[str, typer.Option(help="Grafana's address, such as https://grafana.example.org.")]
Token = Annotated[str | None, typer.Option(help="A service account's token.", envvar="GRAFANA_TOKEN")]
User = Annotated[str | None, typer.Option(help="NAME:PASSWORD, in place of a token.", envvar="GRAFANA_USER")]


@app.callback()
def needed() -> None:
    """Write the dashboards and rules, push the dashboards to a Grafana, or compare them."""
    if any(find_spec(package) is None for package in EXTRA):
        typer.echo(f"caesura dashboards: {INSTALL}", err=True)
        raise typer.Exit(REFUSED)


@app.command()
def render(
    out: Annotated[Path, typer.Option(help="Folder in which grafana/ and prometheus/ are written.")] = Path("deploy"),
    objective: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Share of turns, and of programs, that should be good.")
    ] = 0.95,
    runbooks_url: Annotated[
        str, typer.Option(help="Where docs/runbooks.md can be read, for the links of alerts.")
    ] = "docs/runbooks.md",
) -> None:
    """Write the dashboards, the rules and the scrape configurations."""
    from cluster.offline.dashboards.render import rendered

    for path, text in rendered(objective=objective, runbooks_url=runbooks_url).items():
        target = out / path
        with writing("--out"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        typer.echo(f"Wrote {target}")


@app.command()
def push(
    url: Url,
    token: Token = None,
    user: User = None,
    folder: Annotated[str, typer.Option(help="Title of the folder, if it has to be created.")] = "Caesura",
) -> None:
    """Make a Grafana's dashboards equal to ours. A second run changes nothing."""
    from cluster.offline.dashboards.boards import BOARDS
    from cluster.offline.dashboards.push import GrafanaFolder, GrafanaRefused

    try:
        for difference in GrafanaFolder.at(url, _credentials(token, user), folder).push(BOARDS):
            typer.echo(f"{difference.change:<9} {difference.board.title}")
    except GrafanaRefused as error:
        _refuse(error)


@app.command()
def diff(url: Url, token: Token = None, user: User = None) -> None:
    """Show how a Grafana's dashboards differ from ours; exit status 1 if they do."""
    from cluster.offline.dashboards.boards import BOARDS
    from cluster.offline.dashboards.push import Change, GrafanaFolder, GrafanaRefused

    try:
        differences = GrafanaFolder.at(url, _credentials(token, user), "").differences(BOARDS)
    except GrafanaRefused as error:
        _refuse(error)
    for difference in differences:
        typer.echo(f"{difference.change:<9} {difference.board.title}")
        for line in difference.lines:
            typer.echo(f"  {line}")
    if any(difference.change is not Change.NONE for difference in differences):
        raise typer.Exit(DIFFERENT)


def _credentials(token: str | None, user: str | None) -> str | tuple[str, str] | None:
    if token is not None and user is not None:
        raise typer.BadParameter("give a token or a user, not both")
    if user is None:
        return token
    name, colon, password = user.partition(":")
    if not colon:
        raise typer.BadParameter("--user has to be NAME:PASSWORD")
    return name, password


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"caesura dashboards: {error}", err=True)
    raise typer.Exit(REFUSED) from error
