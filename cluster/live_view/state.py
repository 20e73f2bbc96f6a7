"""`caesura status`: is all well? One row a part."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.table import Table
from rich.text import Text

from cluster.live_view.look import Look


class State(StrEnum):
    """Of a part."""

    OK = "ok"
    TROUBLE = "trouble"
    UNKNOWN = "unknown"
    """The server does not tell: its administration is off, or this key does not open it."""


COLOURS = {State.OK: "green", State.TROUBLE: "red", State.UNKNOWN: "bright_black"}


@dataclass(frozen=True, slots=True)
class Part:
    """One row."""

    name: str
    state: State
    detail: str


def parts_of(look: Look) -> list[Part]:
    """All parts of a server."""
    return [_ingress(look), _replicas(look), _policy(look), _store(look), _predictor(look), _versions(look)]


def is_well(parts: list[Part]) -> bool:
    """Nothing is in trouble; what is not told is not."""
    return all(part.state is not State.TROUBLE for part in parts)


def as_json(url: str, parts: list[Part]) -> dict[str, Any]:
    """The same, for scripts."""
    return {"url": url, "ok": is_well(parts), "parts": [asdict(part) for part in parts]}


def table(parts: list[Part]) -> Table:
    """The same, for people."""
    rows = Table("", "state", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for part in parts:
        rows.add_row(part.name, Text(part.state, COLOURS[part.state]), part.detail)
    return rows


def _ingress(look: Look) -> Part:
    models = ", ".join(str(card.get("id")) for card in look.told.get("models", {}).get("data", []))
    if "ready" in look.told:
        return Part("ingress", State.OK, f"serves {models}" if models else "serves")
    return Part("ingress", State.TROUBLE, look.untold.get("ready", "not ready"))


def _replicas(look: Look) -> Part:
    if "statistics" not in look.told:
        # Without an answer of every replica there is none: that is trouble, unless nobody may ask.
        why = look.untold.get("statistics", "")
        return Part("replicas", State.UNKNOWN if _closed(look, why) else State.TROUBLE, why)
    replicas = look.replicas()
    draining = sum(bool(replica.get("draining")) for replica in replicas)
    said = f"{len(replicas)} answer" + (f", {draining} of them draining" if draining else "")
    return Part("replicas", State.OK if len(replicas) > draining else State.TROUBLE, said)


def _policy(look: Look) -> Part:
    names = sorted({str(replica.get("policy")) for replica in look.replicas()})
    if not names:
        return Part("policy", State.UNKNOWN, look.untold.get("statistics", ""))
    return Part("policy", State.OK if len(names) == 1 else State.TROUBLE, " and ".join(names))


def _store(look: Look) -> Part:
    stores = [view["store"] for view in look.routers().values() if isinstance(view.get("store"), Mapping)]
    if not stores:
        return Part("store", State.UNKNOWN, look.untold.get("router", "this router has none"))
    failures = sum(sum(store.get("failures", {}).values()) for store in stores)
    well = all(store.get("healthy") for store in stores)
    said = f"{'up' if well else 'down'}, {failures} failed exchanges since the start"
    return Part("store", State.OK if well else State.TROUBLE, said)


def _predictor(look: Look) -> Part:
    told = look.told.get("predictor")
    if not isinstance(told, Mapping):
        return Part("predictor", State.UNKNOWN, look.untold.get("predictor", ""))
    answered = {kind: count for kind, count in told.get("answered", {}).items() if count}
    mode = told.get("mode", "on")
    return Part("predictor", State.OK, ", ".join([str(mode), *(f"{kind} {n}" for kind, n in answered.items())]))


def _versions(look: Look) -> Part:
    return Part("versions", State.OK, ", ".join(f"{name} {value}" for name, value in look.told["version"].items()))


def _closed(look: Look, why: str) -> bool:
    """Is all of the administration closed to us, whatever its state?"""
    return why == look.untold.get("router") == look.untold.get("predictor")
