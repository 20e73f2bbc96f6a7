"""`caesura report` and `caesura reference`: pages made from recorded runs, and from the program itself."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from cluster.core.errors import ConfigError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Files of --record or --json of bench, simulate or demo.")],
    out: Annotated[Path | None, typer.Option(help="The page. Default: beside the first file, .html.")] = None,
) -> None:
    """Write one HTML file: goodput against load, latencies, memory over time, programs and their pauses, side by side.

    A record has everything; of a file of --json there are only the numbers and goodput against load.
    """
    from cluster.offline.report.page import render
    from cluster.offline.report.reading import read

    page = render(read(runs))
    path = out or runs[0].with_suffix(".html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    typer.echo(f"Wrote {path}")


class Subject(StrEnum):
    """The subject of a reference page."""

    CONFIGURATION = "configuration"
    METRICS = "metrics"
    CLI = "cli"
    PRESETS = "presets"


def reference(context: typer.Context, subject: Subject) -> None:
    """Print a reference in Markdown: of the configuration, the metrics, the command line or the presets."""
    match subject:
        case Subject.CONFIGURATION:
            from cluster.config.loader import config_schema
            from cluster.offline.reference.pages import schema_page

            text = schema_page(config_schema())
        case Subject.METRICS:
            from cluster.observing.catalogue import CATALOGUE
            from cluster.offline.reference.pages import metrics_page

            text = metrics_page(CATALOGUE)
        case Subject.CLI:
            from cluster.offline.reference.pages import cli_page

            root = context.find_root().command
            assert isinstance(root, TyperGroup)
            text = cli_page(root, context)
        case Subject.PRESETS:
            from cluster.offline.reference.presets import presets_page

            text = presets_page()
    typer.echo(text, nl=False)
