"""A frame of `caesura top`."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.live_view.look import Look
from cluster.live_view.now import GoodputNow, MemoryUse, Now, ReplicaNow, now_of

BAR_CELLS = 32
PROGRAMS_SHOWN = 8
UNKNOWN = "-"
KINDS = (
    ("running", "█", "blue"),
    ("held", "▓", "yellow"),
    ("cached", "▒", "green"),
    ("empty", "░", "bright_black"),
)
"""Of memory: the letters differ, too, for those without colours."""


def frame(url: str, looks: Sequence[Look]) -> RenderableType:
    """What is known after these looks, the last one now."""
    last, now = looks[-1], now_of(looks)
    parts: list[RenderableType] = [_head(url, last, now), _goodput(now.goodput), _front(now), Text()]
    parts.append(_replicas(now.replicas) if now.replicas else Text(_no_replicas(last), style="yellow"))
    parts += [_legend(), *_programs(last)]
    return Group(*parts)


def memory_bar(use: MemoryUse, cells: int = BAR_CELLS) -> Text:
    """``cells`` letters, each kind in proportion; what there is at all has one."""
    bar = Text()
    if not use.capacity:
        return Text(UNKNOWN)
    exact = [cells * getattr(use, kind) / use.capacity for kind, _, _ in KINDS]
    counts = [max(int(share), 1 if share > 0 else 0) for share in exact]
    # What rounding has left, or taken, is that of the largest part: it is least visible there.
    counts[exact.index(max(exact))] += cells - sum(counts)
    for (_, letter, colour), count in zip(KINDS, counts, strict=True):
        bar.append(letter * count, style=colour)
    return bar


def _head(url: str, last: Look, now: Now) -> Text:
    ready = Text("ready", "green") if "ready" in last.told else Text("not ready", "red")
    policies = ", ".join(sorted({replica.policy for replica in now.replicas})) or UNKNOWN
    models = ", ".join(str(card.get("id")) for card in last.told.get("models", {}).get("data", []))
    version = last.told["version"]["caesura"]
    return Text.assemble((f"caesura {version}", "bold"), f"  {url}  ", ready, f"  {models}  policy {policies}")


def _goodput(goodput: GoodputNow) -> Text:
    if {goodput.programs, goodput.offered, goodput.all_requests} == {None}:
        return Text("goodput    not told: /metrics has none of Caesura's counters (yet)", style="bright_black")
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
        f"   waiting at the front {now.waiting_at_front}, moves {now.moves}, refused {now.refusals}"
    )


def _replicas(replicas: Sequence[ReplicaNow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for column in ("replica", "memory", "run", "wait", "programs", "hold/s", "swap/s", "rel./s", "host", "pace"):
        table.add_column(column, justify="left" if column in ("replica", "memory") else "right", no_wrap=True)
    for replica in replicas:
        name = Text(replica.name[-12:])
        if replica.draining:
            name.append(" drains", style="yellow")
        use = replica.memory
        host = f"{use.host / use.host_capacity:.0%}" if use.host_capacity else UNKNOWN
        rates = (_rate(replica.decisions_per_s.get(kind)) for kind in ("hold", "swap", "release"))
        counts = (str(count) for count in (replica.running, replica.waiting, replica.programs))
        pace = UNKNOWN if replica.pace is None else f"{replica.pace:.2f}"
        table.add_row(name, memory_bar(use), *counts, *rates, host, pace)
    return table


def _legend() -> Text:
    said = Text(style="bright_black")
    for kind, letter, colour in KINDS:
        said.append(f"{letter} ", style=colour).append(f"{'free' if kind == 'empty' else kind}  ")
    return said


def _programs(last: Look) -> list[RenderableType]:
    listed = last.told.get("programs", {}).get("data", [])
    if not listed:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("programs run by the cluster", "status", "runs", "model"):
        table.add_column(name)
    for program in listed[:PROGRAMS_SHOWN]:
        table.add_row(*(str(program.get(key)) for key in ("id", "status", "runs", "model")))
    return [Text(), table]


def _no_replicas(last: Look) -> str:
    return f"replicas are not told: {last.untold.get('statistics', 'there are none')}"


def _rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
