"""The numbers of a load, policies side by side."""

from dataclasses import dataclass

from cluster.report.reading import Runs

UNKNOWN = "–"  # noqa: RUF001 - a dash, in a page
NEAR = 0.005
"""Values that differ by less, relatively, are equally good."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A row. ``better``: 1 if more is better, -1 if less is, 0 if neither can be said."""

    label: str
    path: tuple[str, ...]
    better: int
    group: str = ""
    """Named above the first row of each group."""


def _spread(group: str, key: str) -> tuple[Quantity, ...]:
    return tuple(Quantity(name, (key, name), -1, group) for name in ("mean", "p50", "p95", "p99"))


QUANTITIES = (
    Quantity("goodput, programs/s", ("goodput_programs",), 1, "Goodput"),
    Quantity("goodput, requests/s", ("goodput_requests",), 1, "Goodput"),
    Quantity("SLO attainment, programs", ("attainment",), 1, "Goodput"),
    Quantity("programs offered", ("offered",), 0, "Goodput"),
    Quantity("programs completed", ("completed",), 0, "Goodput"),
    *_spread("Time to first token, s", "ttft_s"),
    *_spread("Time per output token, s", "tpot_s"),
    *_spread("Normalised latency, s/token", "norm_latency_s"),
    *_spread("Job completion without tools, s", "jct_s"),
    Quantity("with tools, mean", ("jct_wall_s", "mean"), -1, "Job completion without tools, s"),
    Quantity("scheduling bubble, s/program", ("bubble_s",), -1, "KV memory"),
    Quantity("recomputed tokens/program", ("recomputed_tokens",), -1, "KV memory"),
    Quantity("reused tokens/program", ("reused_tokens",), 1, "KV memory"),
    Quantity("of them from the host", ("fetched_tokens",), 0, "KV memory"),
    Quantity("wasted KV, GiB s", ("wasted_gib_s",), -1, "KV memory"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A value as it is shown."""

    text: str
    ratio: str = ""
    """To the first policy's."""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity of each policy."""

    label: str
    group: str
    cells: tuple[Cell, ...]


def rows(runs: Runs, rate: float) -> list[Row]:
    """Of the policies that ran at this load; quantities that none knows are left out."""
    columns = [column for column in runs.columns if runs.of(column, rate)]
    found: list[Row] = []
    for quantity in QUANTITIES:
        values = [runs.mean(column, rate, *quantity.path) for column in columns]
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
        found.append(Row(quantity.label, quantity.group, cells))
    return found


def shown(value: float | None) -> str:
    """With as many digits as say something."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 0.001 else f"{value:.1e}"


def _near(value: float | None, best: float | None) -> bool:
    return value is not None and best is not None and abs(value - best) <= NEAR * abs(best)


def ratio_of(value: float | None, first: float | None) -> str:
    """Empty where there is none."""
    if value is None or not first:
        return ""
    ratio = value / first
    return f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:,.0f}"  # noqa: RUF001 - times, in a page
