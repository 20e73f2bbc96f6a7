"""`caesura`: the command line. Commands import what they need when they run, so that `--help` is instant."""

import typer

from cluster.commands import model

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(model.app, name="model")


def main() -> None:
    """Console entry point."""
    app()
