"""`caesura config`: what the configuration is, whether it is right, and what may stand in it."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config import CaesuraConfig

app = typer.Typer(no_args_is_help=True, help="Show, check or describe the configuration.")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file; without it the defaults: the built-in model."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one key; the value is YAML. May be repeated."),
]


def read_config(file: Path | None, assignments: list[str] | None) -> "CaesuraConfig":
    """The configuration of a command: the file, then CAESURA__ variables, then --set.

    Raises:
        ConfigError: what is wrong, one line for each.
    """
    from cluster.config_source import load_config, parse_assignment

    return load_config(file, os.environ, dict(parse_assignment(text) for text in assignments or ()))


@app.command()
def show(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Print the configuration in effect as YAML, every default filled in."""
    from cluster.config_source import dump_config

    typer.echo(dump_config(read_config(config, assignments)), nl=False)


@app.command()
def check(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Tell whether the configuration can be used; exit status 2 if not."""
    from cluster.config_source import BUILT_IN

    name = BUILT_IN if config is None else str(config)
    engine = read_config(config, assignments).engine
    if engine:
        from replicas.engine_arguments import unknown_engine_arguments

        if unknown := unknown_engine_arguments(engine):
            raise ConfigError("\n".join(f"{name}: engine.{key}: vLLM has no such engine argument" for key in unknown))
    typer.echo(f"{name} is valid")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from cluster.config_source import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))
