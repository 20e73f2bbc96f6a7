"""The page of a report: one HTML file that loads nothing, scripts included."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cluster.report import decisions, latency, load, memory, table, timeline
from cluster.report.drawing import series_colour
from cluster.report.reading import Column, Run, Runs, number

BOUNDS = (
    ("ttft_s", "time to first token"),
    ("tpot_s", "time per output token"),
    ("e2e_s", "time to a turn's end"),
    ("normalized_latency_s", "seconds a token, over the program without its tools"),
)


@dataclass(frozen=True, slots=True)
class Card:
    """A policy at the load in focus, at a glance."""

    name: str
    colour: str
    goodput: str
    ratio: str
    attainment: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot of one policy."""

    name: str
    colour: str
    plot: Markup
    note: str = ""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Of one policy; ``found`` None: it decides nothing, or nothing was told."""

    name: str
    colour: str
    found: decisions.Decided | None


def render(runs: Runs) -> str:
    """The whole page."""
    folder = files("cluster.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = table.shown
    template = environment.from_string((folder / "page.html.jinja").read_text(encoding="utf-8"))
    rate = load.focus(runs)
    recorded = _recorded(runs, rate)
    view = timeline.view_of(recorded[0][2]) if recorded else None
    return template.render(
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        title=_title(runs),
        subtitle=_subtitle(runs),
        slo=_slo(runs),
        rate=rate,
        policies=[(name, series_colour(index)) for index, name in enumerate(runs.columns.values())],
        cards=_cards(runs, rate),
        loads=load.plots(runs),
        latencies=latency.plots(runs, rate) if recorded else [],
        memories=_memories(recorded),
        memory_kinds=[(words, colour) for _, words, colour in memory.KINDS],
        host=memory.HOST if any(line.host for _, _, run in recorded for line in run.memory) else None,
        timelines=[Panel(n, c, timeline.plot(run, view)) for n, c, run in recorded] if view is not None else [],
        timeline_legend=timeline.LEGEND,
        decisions=_decisions(runs, rate) if recorded else [],
        tables=[(each, _names(runs, each), table.rows(runs, each)) for each in runs.rates],
        commands=list(dict.fromkeys(run.head.command for run in runs.runs if run.head.command)),
        sources=list(dict.fromkeys(run.source for run in runs.runs)),
        versions=_versions(runs),
        several=len({(run.head.seed, run.head.block) for run in runs.runs}),
    )


def _title(runs: Runs) -> str:
    presets = list(dict.fromkeys(run.head.preset for run in runs.runs if run.head.preset))
    return f"{_policies_in_words(runs)} on {', '.join(presets) or 'an unknown setting'}"


def _policies_in_words(runs: Runs) -> str:
    names = list(runs.columns.values())
    return f"{len(names)} policies" if len(names) > 4 else " · ".join(names)


def _subtitle(runs: Runs) -> str:
    rates = " · ".join(f"{rate:g}" for rate in runs.rates)
    seeds = len({run.head.seed for run in runs.runs})
    blocks = len({run.head.block for run in runs.runs})
    more = [f"{count} {word}" for count, word in ((seeds, "seeds"), (blocks, "blocks a policy")) if count > 1]
    offered = sum(number(run.head.summary, "offered") or 0 for run in runs.runs)
    return "; ".join([f"{rates} programs offered per second", *more, f"{offered:,.0f} measured programs in all"])


def _slo(runs: Runs) -> str:
    """In words; what differs between runs is not one SLO."""
    slos = {tuple(run.head.slo.get(key) for key, _ in BOUNDS) for run in runs.runs if run.head.slo}
    if len(slos) != 1:
        return ""
    bounds = zip(slos.pop(), BOUNDS, strict=True)
    said = [f"{words} ≤ {value:.3g} s" for value, (_, words) in bounds if value is not None]
    return "; ".join(said)


def _cards(runs: Runs, rate: float) -> list[Card]:
    cards: list[Card] = []
    first: float | None = None
    for index, (column, name) in enumerate(runs.columns.items()):
        goodput = runs.mean(column, rate, "goodput_programs")
        attainment = runs.mean(column, rate, "attainment")
        if goodput is None:
            continue
        ratio = f"{table.ratio_of(goodput, first)} of {cards[0].name}" if first else ""
        first = goodput if first is None else first
        share = table.UNKNOWN if attainment is None else f"{attainment:.0%}"
        cards.append(Card(name, series_colour(index), table.shown(goodput), ratio, share))
    return cards


def _recorded(runs: Runs, rate: float) -> list[tuple[str, str, Run]]:
    """Of each policy the first run at this load that was recorded: its name, its colour and the run."""
    found = []
    for index, (column, name) in enumerate(runs.columns.items()):
        run = next((run for run in runs.of(column, rate) if run.programs), None)
        if run is not None:
            found.append((name, series_colour(index), run))
    return found


def _memories(recorded: Sequence[tuple[str, str, Run]]) -> list[Panel]:
    panels = []
    end_s = max((line.at_s for _, _, run in recorded for line in run.memory[-1:]), default=0.0)
    for name, colour, run in recorded:
        plot = memory.plot(run, end_s)
        if plot is not None:
            parts = memory.shares(run)
            note = ", ".join(f"{kind} {share:.0f}%" for kind, share in parts.items())
            panels.append(Panel(name, colour, plot, f"in the mean: {note}" if note else ""))
    return panels


def _decisions(runs: Runs, rate: float) -> list[Decisions]:
    return [
        Decisions(name, series_colour(index), decisions.decided(runs.of(column, rate)))
        for index, (column, name) in enumerate(runs.columns.items())
        if any(run.programs for run in runs.of(column, rate))
    ]


def _names(runs: Runs, rate: float) -> list[tuple[str, str]]:
    pairs: list[tuple[int, Column]] = list(enumerate(runs.columns))
    return [(runs.columns[column], series_colour(index)) for index, column in pairs if runs.of(column, rate)]


def _versions(runs: Runs) -> list[str]:
    said = [", ".join(f"{name} {value}" for name, value in run.head.versions.items()) for run in runs.runs]
    return list(dict.fromkeys(text for text in said if text))
