"""`caesura model`: models that come with Caesura."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Models that come with Caesura.")


@app.callback()
def _group() -> None:
    """Models that come with Caesura."""


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; empty, or a tiny model.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Write the built-in random model: any command takes its path as `model.source`."""
    from cluster.errors import ConfigError
    from cluster.tiny.model import write_tiny_model

    try:
        write_tiny_model(directory, seed)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}") from error
    typer.echo(f"wrote {directory}")
