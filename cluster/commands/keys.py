"""`caesura keys`: make API keys, and look a file of them over."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="API keys: make them, and look a file of them over.")


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose it is to be.")],
    role: Annotated[
        list[str] | None, typer.Option(help="What it opens: serve (the default), metrics or admin; may be given again.")
    ] = None,
    name: Annotated[str, typer.Option(help="For people: told in logs, where the key never is.")] = "",
) -> None:
    """Make a key: itself, which is shown only now, and the entry for the file of `keys.file`, which has its digest."""
    import yaml

    from cluster.keys import digest_of, keys_of, new_key

    key = new_key()
    entry = {"tenant": tenant, "sha256": digest_of(key), "roles": role or ["serve"], **({"name": name} if name else {})}
    keys_of({"keys": [entry]}, "caesura keys new")
    typer.echo(f"# The key, shown only now: {key}")
    typer.echo(yaml.safe_dump([entry], sort_keys=False).rstrip())


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A file as `keys.file` names it.")]) -> None:
    """Look a file of keys over: how many there are, of whom, and what they open."""
    from collections import Counter

    from cluster.keys import read_keys

    of = Counter((caller.tenant, ", ".join(sorted(caller.roles))) for caller in read_keys(file).callers())
    for (tenant, roles), count in sorted(of.items()):
        typer.echo(f"{tenant}: {count} ({roles})")
