"""`caesura config` and `caesura keys`: show, check and describe the configuration, and make and check API keys."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.core.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config.schema import CaesuraConfig

app = typer.Typer(no_args_is_help=True, help="Show, check or describe the configuration.")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file; without it the defaults: the built-in model."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one key; the value is YAML. May be repeated."),
]


@app.command()
def show(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Print the configuration in effect as YAML, every default filled in."""
    from cluster.config.loader import dump_config, read_config

    typer.echo(dump_config(read_config(config, assignments)), nl=False)


@app.command()
def check(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Tell whether the configuration can be used, and what is off for its models; exit status 2 if it cannot."""
    from cluster.config.loader import BUILT_IN, read_config
    from cluster.config.model_features import config_of, features_off
    from cluster.config.models import TINY

    name = BUILT_IN if config is None else str(config)
    read = read_config(config, assignments)
    if complaints := [*_unknown_arguments(read), *_missing_paths(read)]:
        raise ConfigError("\n".join(f"{name}: {complaint}" for complaint in complaints))
    for model, own in read.served.items():
        known = None if own.model.source == TINY else config_of(own.model.source)
        for off in features_off(known or {}, own.engine, own.replicas.accelerator):
            typer.echo(f"{name}: model {model}: {off}")
    typer.echo(f"{name} is valid")


def _unknown_arguments(config: "CaesuraConfig") -> Iterator[str]:
    from replicas.settings import unknown_engine_arguments

    engines = {"engine": config.engine} | {f"models.{model}.engine": own.engine for model, own in config.models.items()}
    for section, engine in engines.items():
        for key in unknown_engine_arguments(engine) if engine else ():
            yield f"{section}.{key}: vLLM has no such engine argument"


def _missing_paths(config: "CaesuraConfig") -> Iterator[str]:
    for key, path in {"predictor.bundle": config.predictor.bundle, "auth.file": config.auth.file}.items():
        try:
            if path is not None:
                Path(path).stat()
        except OSError as error:
            yield f"{key}: {path}: {error.strerror}"


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from cluster.config.loader import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))


keys_app = typer.Typer(no_args_is_help=True, help="API keys: make them, and look a file of them over.")


@keys_app.command("new")
def new_key_entry(
    tenant: Annotated[str, typer.Option(help="Whose it is to be.")],
    role: Annotated[
        list[str] | None, typer.Option(help="What it opens: serve (the default), metrics or admin; may be given again.")
    ] = None,
    name: Annotated[str, typer.Option(help="For people: shown in logs, where the key never is.")] = "",
) -> None:
    """Make a key: itself, which is shown only now, and the entry for the file of `auth.file`, which has its digest."""
    import yaml

    from cluster.auth.keys import digest_of, keys_of, new_key

    key = new_key()
    entry = {"tenant": tenant, "sha256": digest_of(key), "roles": role or ["serve"], **({"name": name} if name else {})}
    keys_of({"keys": [entry]}, "caesura keys new")
    typer.echo(f"# The key, shown only now: {key}")
    typer.echo(yaml.safe_dump([entry], sort_keys=False).rstrip())


@keys_app.command("check")
def check_keys(file: Annotated[Path, typer.Argument(help="A file as `auth.file` names it.")]) -> None:
    """Look a file of keys over: how many there are, of whom, and what they open."""
    from cluster.auth.keys import read_keys

    of = Counter((caller.tenant, ", ".join(sorted(caller.roles))) for caller in read_keys(file).callers())
    for (tenant, roles), count in sorted(of.items()):
        typer.echo(f"{tenant}: {count} ({roles})")
