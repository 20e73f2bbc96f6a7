"""The page of a report: one HTML file without scripts, which loads no other file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cluster.offline.bench.metrics import QUANTITIES, UNKNOWN, number, shown, value_of
from cluster.offline.report import plots, timeline
from cluster.offline.report.drawing import series_colour, stylesheet
from cluster.offline.report.reading import Column, Run, Runs

BOUNDS = (
    ("ttft_s", "time to first token"),
    ("tpot_s", "time per output token"),
    ("e2e_s", "time to a turn's end"),
    ("normalized_latency_s", "seconds a token, over the program without its tools"),
)
NEAR = 0.005
"""Relative difference below which two values count as equally good."""
KINDS = ("held", "swapped", "released")
REASONS = 8
"""Number of reasons that are shown for a policy."""


@dataclass(frozen=True, slots=True)
class Card:
    """Overview of a policy at the load in focus."""

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
class Decided:
    """The decisions of one policy about paused programs."""

    total: int
    kinds: tuple[tuple[str, float], ...]
    """Share of each kind of decision, in percent."""
    reasons: tuple[tuple[str, str, int, float], ...]
    """Kind, reason, number and percentage of the most frequent decisions."""
    held_ended: tuple[tuple[str, float], ...]
    """How holds ended, with percentages: used by the next turn, or the reason of another end."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """A policy and its decisions. ``found`` is None if it makes none or none were recorded."""

    name: str
    colour: str
    found: Decided | None


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of a table in its shown form."""

    text: str
    ratio: str = ""
    """Ratio to the value of the first policy."""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: one quantity with a cell for each policy."""

    label: str
    group: str
    cells: tuple[Cell, ...]


def render(runs: Runs) -> str:
    """Return the HTML of the whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    template = environment.from_string(
        (files("cluster.offline.report") / "page.html.jinja").read_text(encoding="utf-8")
    )
    rate = plots.focus(runs)
    recorded = _recorded(runs, rate)
    view = timeline.view_of(recorded[0][2]) if recorded else None
    return template.render(
        style=Markup(stylesheet()),
        title=_title(runs),
        subtitle=_subtitle(runs),
        slo=_slo(runs),
        rate=rate,
        policies=[(name, series_colour(index)) for index, name in enumerate(runs.columns.values())],
        cards=_cards(runs, rate),
        loads=plots.load_plots(runs),
        latencies=plots.latency_plots(runs, rate) if recorded else [],
        memories=_memories(recorded),
        memory_kinds=[(words, colour) for _, words, colour in plots.MEMORY_KINDS],
        host=plots.HOST_KIND if any(line.host for _, _, run in recorded for line in run.memory) else None,
        timelines=[Panel(n, c, timeline.plot(run, view)) for n, c, run in recorded] if view is not None else [],
        timeline_legend=timeline.LEGEND,
        decisions=_decisions(runs, rate) if recorded else [],
        tables=[(each, _names(runs, each), rows(runs, each)) for each in runs.rates],
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
    """Describe the SLO in words; empty if the runs have different SLOs."""
    slos = {tuple(run.head.slo.get(key) for key, _ in BOUNDS) for run in runs.runs if run.head.slo}
    if len(slos) != 1:
        return ""
    bounds = zip(slos.pop(), BOUNDS, strict=True)
    texts = [f"{words} ≤ {value:.3g} s" for value, (_, words) in bounds if value is not None]
    return "; ".join(texts)


def _cards(runs: Runs, rate: float) -> list[Card]:
    cards: list[Card] = []
    first: float | None = None
    for index, (column, name) in enumerate(runs.columns.items()):
        goodput = runs.mean(column, rate, "goodput_programs")
        attainment = runs.mean(column, rate, "attainment")
        if goodput is None:
            continue
        ratio = f"{ratio_of(goodput, first)} of {cards[0].name}" if first else ""
        first = goodput if first is None else first
        share = UNKNOWN if attainment is None else f"{attainment:.0%}"
        cards.append(Card(name, series_colour(index), shown(goodput), ratio, share))
    return cards


def _recorded(runs: Runs, rate: float) -> list[tuple[str, str, Run]]:
    """Return the name, the colour and the first recorded run at this load of each policy."""
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
        plot = plots.memory_plot(run, end_s)
        if plot is not None:
            parts = plots.memory_shares(run)
            note = ", ".join(f"{kind} {share:.0f}%" for kind, share in parts.items())
            panels.append(Panel(name, colour, plot, f"in the mean: {note}" if note else ""))
    return panels


def _decisions(runs: Runs, rate: float) -> list[Decisions]:
    return [
        Decisions(name, series_colour(index), decided(runs.of(column, rate)))
        for index, (column, name) in enumerate(runs.columns.items())
        if any(run.programs for run in runs.of(column, rate))
    ]


def _names(runs: Runs, rate: float) -> list[tuple[str, str]]:
    pairs: list[tuple[int, Column]] = list(enumerate(runs.columns))
    return [(runs.columns[column], series_colour(index)) for index, column in pairs if runs.of(column, rate)]


def _versions(runs: Runs) -> list[str]:
    texts = [", ".join(f"{name} {value}" for name, value in run.head.versions.items()) for run in runs.runs]
    return list(dict.fromkeys(text for text in texts if text))


def rows(runs: Runs, rate: float) -> list[Row]:
    """Return the rows of the table for the policies at this load. Quantities without a known value are omitted."""
    columns = [[run.head.summary for run in runs.of(column, rate)] for column in runs.columns]
    columns = [results for results in columns if results]
    found: list[Row] = []
    for group, quantity in ((group, one) for group, quantities in QUANTITIES.items() for one in quantities):
        values = [value_of(quantity, results) for results in columns]
        known = [value for value in values if value is not None]
        if not known:
            continue
        best = None if quantity.better == 0 or len(known) < 2 else max(known, key=lambda v: v * quantity.better)
        if best is not None and all(_near(value, best) for value in known):
            best = None
        cells = tuple(
            Cell(shown(value), ratio_of(value, values[0]) if index else "", _near(value, best))
            for index, value in enumerate(values)
        )
        found.append(Row(quantity.label, group, cells))
    return found


def _near(value: float | None, best: float | None) -> bool:
    return value is not None and best is not None and abs(value - best) <= NEAR * abs(best)


def ratio_of(value: float | None, first: float | None) -> str:
    """Return the ratio of two values as text; empty if there is none."""
    if value is None or not first:
        return ""
    ratio = value / first
    return f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:,.0f}"  # noqa: RUF001 - times, in a page


def decided(runs: Sequence[Run]) -> Decided | None:
    """Count the decisions in all runs of one policy at one load. None: no decisions were recorded (stock vLLM)."""
    counted: Counter[tuple[str, str]] = Counter()
    ends: Counter[str] = Counter()
    for run in runs:
        for program in run.programs:
            # There is no decision after a program's last turn.
            for turn in program.turns[:-1]:
                if turn.decision:
                    counted[turn.decision, turn.reason or "the program went on at once"] += 1
            for pause, after in pairwise((*program.pauses, None)):
                if pause is not None and pause.phase == "held":
                    broken = after is not None and after.from_s == pause.to_s
                    ends[(after.reason or after.phase) if after is not None and broken else "used"] += 1
    total = sum(counted.values())
    if not total:
        return None
    kinds = Counter[str]()
    for (kind, _), count in counted.items():
        kinds[kind] += count
    return Decided(
        total=total,
        kinds=tuple((kind, 100 * kinds[kind] / total) for kind in KINDS if kinds[kind]),
        reasons=tuple((kind, why, n, 100 * n / total) for (kind, why), n in counted.most_common(REASONS)),
        held_ended=tuple((how, 100 * n / sum(ends.values())) for how, n in ends.most_common()),
    )
