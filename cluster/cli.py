"""The command line `caesura`. Each command imports its modules when it runs, so that `--help` is fast."""

import sys

import typer

from cluster.core.errors import ConfigError, TraceError
from cluster.offline.commands import (
    bench,
    config,
    dashboards,
    demo,
    model,
    pages,
    predictor,
    programs,
    reproduce,
    serve,
    simulate,
    top,
    trace,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(config.app, name="config")
app.add_typer(dashboards.app, name="dashboards")
app.add_typer(config.keys_app, name="keys")
app.add_typer(model.app, name="model")
app.add_typer(predictor.app, name="predictor")
app.add_typer(programs.app, name="programs")
app.add_typer(trace.app, name="trace")
app.command()(bench.bench)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(model.profile)
app.command()(pages.reference)
app.command()(pages.report)
app.command()(reproduce.reproduce)
app.command()(simulate.simulate)
app.command()(top.status)
app.command()(programs.tools)
app.command()(top.top)

BAD_INPUT = 2
"""Exit status for an invalid configuration or trace."""


def main() -> None:
    """Run the command line. It is the console entry point."""
    try:
        app()
    except (ConfigError, TraceError) as error:
        typer.echo(error, err=True)
        sys.exit(BAD_INPUT)
