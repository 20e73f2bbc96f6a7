"""Brings the dashboards to a Grafana, and tells where it has others; by Grafana's HTTP API, with `grafana-client`."""

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

from cluster.dashboards.board import Board
from cluster.dashboards.drawing import as_data
from cluster.errors import CaesuraError

Answer = TypeVar("Answer")

FOLDER_UID = "caesura"
TIMEOUT_S = 10.0
NOT_FOUND = 404
GRAFANAS_OWN = ("id", "version")
"""Keys of a dashboard that Grafana counts by itself."""


class GrafanaRefused(CaesuraError):
    """Grafana cannot be reached, or does not do what it is asked."""


class Change(StrEnum):
    """What a dashboard of ours is to a Grafana."""

    NEW = "new"
    CHANGED = "changed"
    """It has another one under the same uid, or keeps it in another folder."""
    NONE = "unchanged"


@dataclass(frozen=True, slots=True)
class Difference:
    """One dashboard of ours, and what a Grafana has of it."""

    board: Board
    change: Change
    lines: tuple[str, ...] = ()
    """A unified diff from theirs to ours; empty where only the folder differs."""


class Place:
    """A folder of a Grafana.

    Args:
        api: the client.
        folder: the title that the folder gets if it has to be made.
    """

    def __init__(self, api: GrafanaApi, folder: str) -> None:
        self._api = api
        self._folder = folder

    @classmethod
    def at(cls, url: str, credential: str | tuple[str, str] | None, folder: str) -> "Place":
        """The folder of the Grafana at ``url``. ``credential``: a token, or a name and a password.

        Raises:
            GrafanaRefused: ``url`` is none of HTTP.
        """
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise GrafanaRefused(f"{url} is not an http:// or https:// URL")
        # The client puts a path before `api` as it is.
        slashed = url if url.endswith("/") or not urlsplit(url).path else f"{url}/"
        return cls(GrafanaApi.from_url(slashed, credential=credential, timeout=TIMEOUT_S), folder)

    def differences(self, boards: Sequence[Board]) -> list[Difference]:
        """Each board beside what Grafana has of it; changes nothing.

        Raises:
            GrafanaRefused: it cannot be asked.
        """
        return [self._difference(board) for board in boards]

    def push(self, boards: Sequence[Board]) -> list[Difference]:
        """Make Grafana's dashboards the same as ``boards``; what was different before is told.

        Raises:
            GrafanaRefused: it cannot be asked, or refuses.
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
                _asked(partial(self._api.dashboard.update_dashboard, payload))
        return differences

    def _difference(self, board: Board) -> Difference:
        theirs = _found(lambda: self._api.dashboard.get_dashboard(board.uid))
        if theirs is None:
            return Difference(board, Change.NEW)
        lines = tuple(
            unified_diff(_lines(theirs["dashboard"]), _lines(as_data(board)), "grafana", "caesura", lineterm="")
        )
        if not lines and theirs.get("meta", {}).get("folderUid") == FOLDER_UID:
            return Difference(board, Change.NONE)
        return Difference(board, Change.CHANGED, lines)

    def _make_folder(self) -> None:
        if _found(lambda: self._api.folder.get_folder(FOLDER_UID)) is None:
            _asked(lambda: self._api.folder.create_folder(self._folder, uid=FOLDER_UID))


def _lines(dashboard: dict[str, Any]) -> list[str]:
    own = {key: value for key, value in dashboard.items() if key not in GRAFANAS_OWN}
    return json.dumps(own, indent=1, sort_keys=True).splitlines()


def _found(ask: Callable[[], Any]) -> Any | None:
    """What Grafana has; None if it has none."""
    try:
        return _asked(ask)
    except GrafanaRefused as error:
        if isinstance(error.__cause__, GrafanaClientError) and error.__cause__.status_code == NOT_FOUND:
            return None
        raise


def _asked(ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except GrafanaException as error:
        raise GrafanaRefused(f"Grafana says: {error.message}") from error
    except (niquests.RequestException, ValueError) as error:
        raise GrafanaRefused(f"Grafana cannot be asked: {error}") from error
