"""`caesura reference`: the pages of the documentation that are made from the program itself."""

from enum import StrEnum

import typer
from typer.core import TyperGroup


class Subject(StrEnum):
    """What a page is about."""

    CONFIGURATION = "configuration"
    METRICS = "metrics"
    CLI = "cli"


def reference(context: typer.Context, subject: Subject) -> None:
    """Print a reference in Markdown: of the configuration, the metrics or the command line."""
    match subject:
        case Subject.CONFIGURATION:
            from cluster.config_source import config_schema
            from cluster.reference.schema_page import schema_page

            text = schema_page(config_schema())
        case Subject.METRICS:
            from cluster.metrics import CATALOGUE
            from cluster.reference.metrics_page import metrics_page

            text = metrics_page(CATALOGUE)
        case Subject.CLI:
            from cluster.reference.cli_page import cli_page

            root = context.find_root().command
            assert isinstance(root, TyperGroup)
            text = cli_page(root, context)
    typer.echo(text, nl=False)
