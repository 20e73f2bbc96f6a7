"""A question to a running server, as commands ask it."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cluster.keys import client_headers

Url = Annotated[str, typer.Option(help="The server.")]
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0

UNKNOWN = 1
"""Exit status where the server has no answer."""


def asked(method: str, url: str, path: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the server answers.

    Raises:
        Exit: it has no answer; why has been said.
    """
    import httpx

    try:
        headers = client_headers()
        answer = httpx.request(method, url.rstrip("/") + path, params=parameters, headers=headers, timeout=TIMEOUT_S)
        told: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error
    if not answer.is_success:
        typer.echo(f"{url}: {told.get('error', {}).get('message', answer.status_code)}", err=True)
        raise typer.Exit(UNKNOWN)
    return told
