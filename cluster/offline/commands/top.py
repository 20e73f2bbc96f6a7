"""`caesura top` and `caesura status`: show the activity of a running server, and the state of its parts."""

import asyncio
from collections import deque
from contextlib import suppress
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.offline.commands._common import DEFAULT_URL, UNKNOWN, Url

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.offline.live_view.look import Look

REMEMBERED_S = 30.0
"""Seconds over which goodput is shown."""


def top(
    url: Url = DEFAULT_URL,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Look twice, print one frame, and end.")] = False,
) -> None:
    """Programs, replicas, memory, decisions and goodput of a running server, live; Ctrl-C ends it."""
    from rich.console import Console

    from cluster.offline.live_view.look import NoServer

    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_watch(url, interval_s, once, Console(highlight=False)))
    except NoServer as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error


def status(
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Is all well? One row a part of a running server; exit status 1 if one is in trouble."""
    from rich.console import Console

    from cluster.offline.bench.terminal import print_table
    from cluster.offline.live_view.frame import as_json, is_well, parts_of, table
    from cluster.offline.live_view.look import NoServer

    try:
        parts = parts_of(asyncio.run(_look_once(url)))
    except NoServer as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error
    if json:
        typer.echo(dumps(as_json(url, parts), indent=2))
    else:
        print_table(table(parts), Console(highlight=False))
    if not is_well(parts):
        raise typer.Exit(UNKNOWN)


async def _look_once(url: str) -> "Look":
    from cluster.core.clock import MonotonicClock
    from cluster.offline.live_view.look import client_of, look

    async with client_of(url) as client:
        return await look(client, MonotonicClock())


async def _watch(url: str, interval_s: float, once: bool, console: "Console") -> None:
    from rich.live import Live

    from cluster.core.clock import MonotonicClock
    from cluster.offline.live_view.frame import frame
    from cluster.offline.live_view.look import client_of, look

    clock = MonotonicClock()
    async with client_of(url) as client:
        looks: deque[Look] = deque([await look(client, clock)], maxlen=max(2, round(REMEMBERED_S / interval_s)))
        if once:
            await asyncio.sleep(interval_s)
            looks.append(await look(client, clock))
            console.print(frame(url, list(looks)))
            return
        with Live(frame(url, list(looks)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                looks.append(await look(client, clock))
                live.update(frame(url, list(looks)), refresh=True)
