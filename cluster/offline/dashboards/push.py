"""Pushes the dashboards to a Grafana and compares them with its own, through its HTTP API (`grafana-client`)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import niquests
from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException

from cluster.core.errors import CaesuraError
from cluster.offline.dashboards.board import Board
from cluster.offline.dashboards.grafana import as_data

Answer = TypeVar("Answer")

FOLDER_UID = "caesura"
TIMEOUT_S = 10.0
NOT_FOUND = 404
GRAFANAS_OWN = ("id", "version")
"""Keys of a dashboard that Grafana sets itself."""


class GrafanaRefused(CaesuraError):
    """Grafana cannot be reached, or rejects a request."""


class Change(StrEnum):
    """How a dashboard differs from Grafana's."""

    NEW = "new"
    CHANGED = "changed"
    """Grafana has a different dashboard with this uid, or has it in another folder."""
    NONE = "unchanged"


@dataclass(frozen=True, slots=True)
class Difference:
    """One dashboard, compared with Grafana's."""

    board: Board
    change: Change
    lines: tuple[str, ...] = ()
    """Unified diff from Grafana's dashboard to ours; empty if only the folder differs."""


class GrafanaFolder:
    """A folder in a Grafana.

    Args:
        api: the client.
        folder: title of the folder, if it has to be created.
    """

    def __init__(self, api: GrafanaApi, folder: str) -> None:
        self._api = api
        self._folder = folder

    @classmethod
    def at(cls, url: str, credential: str | tuple[str, str] | None, folder: str) -> "GrafanaFolder":
        """The folder of the Grafana at ``url``. ``credential``: a token, or a name and a password.

        Raises:
            GrafanaRefused: ``url`` is not an HTTP URL.
        """
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise GrafanaRefused(f"{url} is not an http:// or https:// URL")
        # The client appends `api` to the path without a slash.
        slashed = url if url.endswith("/") or not urlsplit(url).path else f"{url}/"
        return cls(GrafanaApi.from_url(slashed, credential=credential, timeout=TIMEOUT_S), folder)

    def differences(self, boards: Sequence[Board]) -> list[Difference]:
        """Compare each board with Grafana's, without a change.

        Raises:
            GrafanaRefused: Grafana cannot be reached.
        """
        return [self._difference(board) for board in boards]

    def push(self, boards: Sequence[Board]) -> list[Difference]:
        """Make Grafana's dashboards equal to ``boards``. Return the differences that existed before.

        Raises:
            GrafanaRefused: Grafana cannot be reached, or rejects a dashboard.
        """
        differences = self.differences(boards)
        if any(difference.change is not Change.NONE for difference in differences):
            self._make_folder()
        for difference in differences:
            if difference.change is not Change.NONE:
                payload = {
                    "dashboard": as_data(difference.board),
                    "folderUid": FOLDER_UID,
                    "overwrite": True,
                    "message": "caesura dashboards push",
                }
                _call(partial(self._api.dashboard.update_dashboard, payload))
        return differences

    def _difference(self, board: Board) -> Difference:
        theirs = _get(lambda: self._api.dashboard.get_dashboard(board.uid))
        if theirs is None:
            return Difference(board, Change.NEW)
        lines = tuple(
            unified_diff(_lines(theirs["dashboard"]), _lines(as_data(board)), "grafana", "caesura", lineterm="")
        )
        if not lines and theirs.get("meta", {}).get("folderUid") == FOLDER_UID:
            return Difference(board, Change.NONE)
        return Difference(board, Change.CHANGED, lines)

    def _make_folder(self) -> None:
        if _get(lambda: self._api.folder.get_folder(FOLDER_UID)) is None:
            _call(lambda: self._api.folder.create_folder(self._folder, uid=FOLDER_UID))


def _lines(dashboard: dict[str, Any]) -> list[str]:
    own = {key: value for key, value in dashboard.items() if key not in GRAFANAS_OWN}
    return json.dumps(own, indent=1, sort_keys=True).splitlines()


def _get(call: Callable[[], Any]) -> Any | None:
    """Return the answer; None if Grafana has no such object."""
    try:
        return _call(call)
    except GrafanaRefused as error:
        if isinstance(error.__cause__, GrafanaClientError) and error.__cause__.status_code == NOT_FOUND:
            return None
        raise


def _call(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except GrafanaException as error:
        raise GrafanaRefused(f"Grafana answers: {error.message}") from error
    except (niquests.RequestException, ValueError) as error:
        raise GrafanaRefused(f"Grafana cannot be reached: {error}") from error
