"""Terminal views of a running server: a frame of `caesura top`, and the parts of `caesura status`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.offline.bench.history import MemoryUse
from cluster.offline.live_view.look import Look
from cluster.offline.live_view.now import EARLY_PREFILL, GoodputNow, Now, ReplicaNow, now_of

BAR_CELLS = 32
PROGRAMS_SHOWN = 8
REFUSALS_SHOWN = 6
UNKNOWN = "-"
KINDS = (
    ("running", "█", "blue"),
    ("held", "▓", "yellow"),
    ("cached", "▒", "green"),
    ("empty", "░", "bright_black"),
)
"""Kinds of memory with a character and a colour. The characters differ for terminals without colours."""


def frame(url: str, looks: Sequence[Look]) -> RenderableType:
    """Return a frame of `caesura top` from several looks, the last of which is the current one."""
    last, now = looks[-1], now_of(looks)
    parts: list[RenderableType] = [_head(url, last, now), _goodput(now.goodput), _front(now), _early(now), Text()]
    parts.append(_replicas(now.replicas) if now.replicas else Text(_no_replicas(last), style="yellow"))
    parts += [_legend(), *_refused(now), *_programs(last)]
    return Group(*parts)


def memory_bar(use: MemoryUse, cells: int = BAR_CELLS) -> Text:
    """Return a bar of ``cells`` characters, proportional to the kinds of memory. Each kind in use has at least one."""
    bar = Text()
    if not use.capacity:
        return Text(UNKNOWN)
    exact = [cells * getattr(use, kind) / use.capacity for kind, _, _ in KINDS]
    counts = [max(int(share), 1 if share > 0 else 0) for share in exact]
    # The largest part absorbs the rounding error, where it is least visible.
    counts[exact.index(max(exact))] += cells - sum(counts)
    for (_, letter, colour), count in zip(KINDS, counts, strict=True):
        bar.append(letter * count, style=colour)
    return bar


def _head(url: str, last: Look, now: Now) -> Text:
    ready = Text("ready", "green") if "ready" in last.answers else Text("not ready", "red")
    policies = ", ".join(sorted({replica.policy for replica in now.replicas})) or UNKNOWN
    models = ", ".join(str(card.get("id")) for card in last.answers.get("models", {}).get("data", []))
    version = last.answers["version"]["caesura"]
    return Text.assemble((f"caesura {version}", "bold"), f"  {url}  ", ready, f"  {models}  policy {policies}")


def _goodput(goodput: GoodputNow) -> Text:
    if {goodput.programs, goodput.offered, goodput.all_requests} == {None}:
        return Text("goodput    unknown: /metrics has none of Caesura's counters (yet)", style="bright_black")
    share = UNKNOWN if goodput.attainment is None else f"{goodput.attainment:.0%} of those that ended"
    return Text.assemble(
        "goodput    ",
        (f"{_rate(goodput.programs)} programs/s", "bold"),
        f" ({share}; {_rate(goodput.offered)} offered)",
        f"   {_rate(goodput.requests)} of {_rate(goodput.all_requests)} requests/s",
        (f"   over {goodput.window_s:.0f} s", "bright_black"),
    )


def _front(now: Now) -> Text:
    decided = sum(sum(replica.decisions_per_s.values()) for replica in now.replicas)
    known = any(replica.decisions_per_s for replica in now.replicas)
    return Text(
        f"decisions  {_rate(decided if known else None)}/s at pauses, {_rate(now.placements_per_s)}/s placements"
        f"   waiting at the front {_count(now.waiting_at_front)}, moves {_count(now.moves)},"
        f" refused {_count(now.refusals)}"
    )


def _early(now: Now) -> Text:
    used, wasted = (
        sum(replica.early_prefill_per_s.get(kind, 0.0) for replica in now.replicas) for kind in EARLY_PREFILL
    )
    known = any(replica.early_prefill_per_s for replica in now.replicas)
    pending = sum(replica.early_prefill_pending for replica in now.replicas)
    return Text(
        f"prefill    in pauses: {_rate(used if known else None)} tokens/s used, "
        f"{_rate(wasted if known else None)} wasted, {pending} tokens pending"
    )


def _replicas(replicas: Sequence[ReplicaNow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for column in (
        "replica",
        "memory",
        "run",
        "wait",
        "programs",
        "hold/s",
        "swap/s",
        "rel./s",
        "host",
        "disk",
        "pace",
    ):
        table.add_column(column, justify="left" if column in ("replica", "memory") else "right", no_wrap=True)
    for replica in replicas:
        name = Text(replica.name[-12:])
        if replica.draining:
            name.append(" drains", style="yellow")
        use = replica.memory
        host = f"{use.host / use.host_capacity:.0%}" if use.host_capacity else UNKNOWN
        disk = Text(UNKNOWN if replica.disk_share is None else f"{replica.disk_share:.0%}")
        if replica.disk_troubles:
            disk = Text(", ".join(replica.disk_troubles), style="yellow")
        rates = (_rate(replica.decisions_per_s.get(kind)) for kind in ("hold", "swap", "release"))
        counts = (str(count) for count in (replica.running, replica.waiting, replica.programs))
        pace = UNKNOWN if replica.pace is None else f"{replica.pace:.2f}"
        table.add_row(name, memory_bar(use), *counts, *rates, host, disk, pace)
    return table


def _legend() -> Text:
    text = Text(style="bright_black")
    for kind, letter, colour in KINDS:
        text.append(f"{letter} ", style=colour).append(f"{'free' if kind == 'empty' else kind}  ")
    return text


def _refused(now: Now) -> list[RenderableType]:
    if not now.refused:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("refused requests", "status", "code"):
        table.add_column(name, overflow="fold")
    for name in (f"last {now.goodput.window_s:.0f} s", "in all"):
        table.add_column(name, justify="right")
    for one in now.refused[:REFUSALS_SHOWN]:
        style = "yellow" if one.recent else "bright_black"
        table.add_row(one.route, one.status, one.code, str(one.recent), str(one.total), style=style)
    return [Text(), table]


def _programs(last: Look) -> list[RenderableType]:
    listed = last.answers.get("programs", {}).get("data", [])
    if not listed:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("last seen programs", "status", "turns", "runs", "model"):
        table.add_column(name, overflow="fold")
    for program in listed[:PROGRAMS_SHOWN]:
        table.add_row(*(str(program.get(key, UNKNOWN)) for key in ("id", "status", "turns", "runs", "model")))
    return [Text(), table]


def _no_replicas(last: Look) -> str:
    return f"replicas are unknown: {last.errors.get('statistics', 'there are none')}"


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class State(StrEnum):
    """State of a part of a server."""

    OK = "ok"
    TROUBLE = "trouble"
    UNKNOWN = "unknown"
    """The server does not report the state: its admin routes are off, or this key has no access to them."""


COLOURS = {State.OK: "green", State.TROUBLE: "red", State.UNKNOWN: "bright_black"}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a server: a row of `caesura status`."""

    name: str
    state: State
    detail: str


def parts_of(look: Look) -> list[Part]:
    """Return all parts of a server with their states."""
    return [_ingress(look), _replicas_part(look), _policy(look), _store(look), _predictor(look), _versions(look)]


def is_well(parts: list[Part]) -> bool:
    """Return whether no part is in trouble. An unknown state is no trouble."""
    return all(part.state is not State.TROUBLE for part in parts)


def as_json(url: str, parts: list[Part]) -> dict[str, Any]:
    """Return the parts as JSON for scripts."""
    return {"url": url, "ok": is_well(parts), "parts": [asdict(part) for part in parts]}


def table(parts: list[Part]) -> Table:
    """Return the parts as a table."""
    rows = Table("", "state", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for part in parts:
        rows.add_row(part.name, Text(part.state, COLOURS[part.state]), part.detail)
    return rows


def _ingress(look: Look) -> Part:
    models = ", ".join(str(card.get("id")) for card in look.answers.get("models", {}).get("data", []))
    if "ready" in look.answers:
        return Part("ingress", State.OK, f"serves {models}" if models else "serves")
    return Part("ingress", State.TROUBLE, look.errors.get("ready", "not ready"))


def _replicas_part(look: Look) -> Part:
    if "statistics" not in look.answers:
        # The route answers only if every replica does. No answer is trouble, unless this key has no access.
        why = look.errors.get("statistics", "")
        return Part("replicas", State.UNKNOWN if _closed(look, why) else State.TROUBLE, why)
    replicas = look.replicas()
    draining = sum(bool(replica.get("draining")) for replica in replicas)
    text = f"{len(replicas)} answer" + (f", {draining} of them draining" if draining else "")
    return Part("replicas", State.OK if len(replicas) > draining else State.TROUBLE, text)


def _policy(look: Look) -> Part:
    names = sorted({str(replica.get("policy")) for replica in look.replicas()})
    if not names:
        return Part("policy", State.UNKNOWN, look.errors.get("statistics", ""))
    return Part("policy", State.OK if len(names) == 1 else State.TROUBLE, " and ".join(names))


def _store(look: Look) -> Part:
    stores = [view["store"] for view in look.routers().values() if isinstance(view.get("store"), Mapping)]
    if not stores:
        return Part("store", State.UNKNOWN, look.errors.get("router", "this router has none"))
    failures = sum(sum(store.get("failures", {}).values()) for store in stores)
    well = all(store.get("healthy") for store in stores)
    text = f"{'up' if well else 'down'}, {failures} failed exchanges since the start"
    return Part("store", State.OK if well else State.TROUBLE, text)


def _predictor(look: Look) -> Part:
    status = look.answers.get("predictor")
    if not isinstance(status, Mapping):
        return Part("predictor", State.UNKNOWN, look.errors.get("predictor", ""))
    answered = {kind: count for kind, count in status.get("answered", {}).items() if count}
    mode = status.get("mode", "on")
    return Part("predictor", State.OK, ", ".join([str(mode), *(f"{kind} {n}" for kind, n in answered.items())]))


def _versions(look: Look) -> Part:
    return Part("versions", State.OK, ", ".join(f"{name} {value}" for name, value in look.answers["version"].items()))


def _closed(look: Look, why: str) -> bool:
    """Return whether all admin routes fail for the same reason, so that they are off or this key has no access."""
    return why == look.errors.get("router") == look.errors.get("predictor")
