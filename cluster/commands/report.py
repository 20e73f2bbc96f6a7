"""`caesura report`: a page of plots from recorded runs."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import ConfigError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Files of --record or --json of bench, simulate or demo.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: beside the first file, .html.")] = None,
) -> None:
    """Write one HTML file: goodput against load, latencies, memory over time, programs and their pauses, side by side.

    A record has everything; of a file of --json there are only the numbers and goodput against load.
    """
    from cluster.report.page import render
    from cluster.report.reading import read

    page = render(read(runs))
    path = out or runs[0].with_suffix(".html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    typer.echo(f"Wrote {path}")
