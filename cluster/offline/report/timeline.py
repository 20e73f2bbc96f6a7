"""A plot with a row for each program: when its turns waited and ran, and where its KV was during pauses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from cluster.offline.bench.record import PausePart, ProgramLine
from cluster.offline.report.drawing import Axis, Drawing, Frame, linear
from cluster.offline.report.reading import Run

ROWS = 36
"""Programs that are drawn, at most."""
ROW_PX = 11.0
WIDTH_PX = 1150.0
LONGEST_VIEW_S = 600.0
SHARE_SHOWN = 0.85
"""Share of the drawn programs that end within the plot."""

UNFINISHED = "unfinished"
WAITING, RUNNING = "var(--waiting)", "var(--running)"
PAUSES = {
    "held": ("held", "var(--held)"),
    "swapped": ("swapped to the host", "var(--swapped)"),
    "fetching": ("fetched from the host", "var(--fetching)"),
    "released": ("released", "var(--released)"),
}
LEGEND = (
    ("waits in the queue", WAITING),
    ("turn runs", RUNNING),
    *PAUSES.values(),
)


@dataclass(frozen=True, slots=True)
class View:
    """The drawn programs and the drawn time range."""

    from_s: float
    to_s: float
    names: frozenset[str]
    """Names of the programs without the prefix of the run, see `name_of`."""


def view_of(run: Run) -> View:
    """Select the programs that arrive after the middle of the measured window, when the system is fully loaded."""
    begin_s, end_s = run.head.window_s
    middle_s = (begin_s + end_s) / 2
    ordered = sorted(run.programs, key=lambda program: program.arrival_s)
    chosen = [p for p in ordered if p.arrival_s >= middle_s][:ROWS] or ordered[-ROWS:]
    ends = sorted(_end_s(program) for program in chosen)
    from_s = chosen[0].arrival_s if chosen else 0.0
    to_s = ends[int(SHARE_SHOWN * (len(ends) - 1))] if ends else 1.0
    to_s = min(max(to_s, chosen[-1].arrival_s if chosen else 1.0), from_s + LONGEST_VIEW_S)
    return View(from_s, max(to_s, from_s + 1.0), frozenset(name_of(program) for program in chosen))


def name_of(program: ProgramLine) -> str:
    """Return a program's number in its block, which is the same under every policy."""
    return program.program.rsplit("-", 1)[-1]


def plot(run: Run, view: View) -> Markup:
    """Plot the programs of ``view`` in this run."""
    chosen = sorted((p for p in run.programs if name_of(p) in view.names), key=lambda p: p.arrival_s)
    frame = Frame(WIDTH_PX, ROW_PX * len(chosen) + 48, left=112, top=6)
    ticks = linear([view.from_s, view.to_s], "seconds", ticks=12, from_zero=False).ticks
    x = Axis(view.from_s, view.to_s, ticks, "seconds since the run began")
    drawing = Drawing(frame, x, Axis(0, max(1, len(chosen)), (), ""), f"Programs over time, {run.head.policy}")
    for row, program in enumerate(chosen):
        _row(drawing, program, len(chosen) - row - 1, view)
    return drawing.done(y_ticks=False)


def _row(drawing: Drawing, program: ProgramLine, row: int, view: View) -> None:
    middle = row + 0.5
    end_s = min(_end_s(program), view.to_s)
    label = f"{name_of(program)} {program.kind}"[:16]
    drawing.text(drawing.frame.left - 8, drawing.py(middle) + 3.5, label, "row", "end")
    if end_s > program.arrival_s:
        drawing.box((program.arrival_s, end_s), (middle - 0.04, middle + 0.04), "var(--faint)")
    for pause in (*_as_decided(program), *program.pauses):
        words, colour = PAUSES.get(pause.phase, (pause.phase, "var(--faint)"))
        half = 0.1 if pause.phase == "released" else 0.24
        if pause.from_s < view.to_s and pause.to_s > view.from_s:
            title = f"{words} for {pause.to_s - pause.from_s:.3g} s: {pause.reason or 'unknown reason'}"
            drawing.box((pause.from_s, pause.to_s), (middle - half, middle + half), colour, title)
    for number, turn in enumerate(program.turns, 1):
        if turn.start_s > view.to_s:
            break
        last_s = turn.last_s if turn.last_s is not None else view.to_s
        waited_s = turn.queue_s or 0.0
        never_began = turn.queue_s is None and turn.first_s is None
        begun_s = last_s if never_began else min(turn.start_s + waited_s, last_s)
        if begun_s > turn.start_s:
            title = f"turn {number} waits {begun_s - turn.start_s:.3g} s"
            drawing.box((turn.start_s, begun_s), (middle - 0.38, middle + 0.38), WAITING, title)
        if begun_s == last_s:
            continue
        title = f"turn {number}: {turn.prompt_tokens} + {turn.output_tokens} tokens in {last_s - begun_s:.3g} s"
        drawing.box((begun_s, last_s), (middle - 0.38, middle + 0.38), RUNNING, title)
    _mark(drawing, program, middle, view)


def _as_decided(program: ProgramLine) -> list[PausePart]:
    """Return a long program's early pauses, whose events the replica has dropped, from the decisions at their begin."""
    known_from_s = min((pause.from_s for pause in program.pauses), default=math.inf)
    pauses: list[PausePart] = []
    for turn, after in pairwise(program.turns):
        if turn.last_s is None or after.start_s > known_from_s:
            break
        if turn.decision in PAUSES:
            reason = f"as decided: {turn.reason or 'unknown reason'}"
            pauses.append(PausePart(turn.last_s, after.start_s, turn.decision, reason))
    return pauses


def _mark(drawing: Drawing, program: ProgramLine, middle: float, view: View) -> None:
    end_s = _end_s(program)
    if end_s > view.to_s or program.outcome == UNFINISHED:
        return
    colour = "var(--good)" if program.good else "var(--bad)"
    title = "met the SLO" if program.good else f"did not meet the SLO ({program.outcome})"
    drawing.dot(end_s, middle, colour, title=title, radius=3.0)


def _end_s(program: ProgramLine) -> float:
    times: Sequence[float] = [turn.last_s for turn in program.turns if turn.last_s is not None]
    return max((*times, program.arrival_s))
