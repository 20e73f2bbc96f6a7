"""Fits the efficiency of a device to its measured steps, and states the error on steps that were not fitted.

Half of the shapes of each model are fitted, like the white squares of a chessboard of tokens and contexts. The others,
all steps that mix prompts and decodes, all other numbers of ranks and all other sources are held out: errors are of
those only. Each model and phase has the same weight, whatever its number of rows.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel
from replicas.presets import DEVICES, FITS, MODELS, Efficiency, fit_of, preset
from replicas.silicon.measurements import RETRIEVED, SAME_DEVICE, SOURCES, Measurement, cost_of, load, predicted_s

FITTED_KINDS = ("decode", "prefill")
FITTED_SOURCES = {"rtx-4090": "llmservingsim"}
"""Source of the fitted rows of each device; of the others it is `aic`."""
OLD_ENGINE = {"engine-2023": ("a100-80", "distserve")}
"""Device and source of the rows of an engine of the past."""
ASSUMED_LINK = (0.6, 10e-6)
"""Share of the link and seconds of the smallest all-reduce where none was measured."""
DIGITS = 4
"""Significant digits of a fitted number. More would differ from one machine to another."""
START = (0.7, 0.6, 0.85, 50e-6, 1e-7)
FREE = ("compute", "attention", "bandwidth", "layer_s", "layer_sequence_s")
"""The numbers that are fitted to steps. The others are fitted to the all-reduce."""
LARGEST = (1.0, 1.0, 1.0, 1e-3, 1e-4)
SMALLEST = (0.05, 0.05, 0.05, 1e-9, 1e-12)


FIT_NAMES = (*dict.fromkeys(device.measured_on for device in DEVICES.values()), *OLD_ENGINE)
"""Names of all fits."""


class Group(NamedTuple):
    """The rows among which an error is stated."""

    source: str
    engine: str
    device: str
    model: str
    ranks: int
    phase: str


@dataclass(frozen=True, slots=True)
class Errors:
    """Predicted over measured times of some rows."""

    rows: int
    ratio: float
    """Median of predicted over measured."""
    error: float
    """Median of the distance of this ratio from 1."""
    p10: float
    p90: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> "Errors":
        """Summarize ratios of predicted over measured times; there is at least one."""
        values = np.array(list(ratios))
        numbers = (np.median(values), np.median(np.abs(values - 1)), *np.percentile(values, (10, 90)))
        return cls(len(values), *(round(float(number), 3) for number in numbers))


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """A fitted efficiency, and the rows that it was fitted to."""

    name: str
    reached: Efficiency
    fitted: tuple[Measurement, ...]
    held_out: tuple[Measurement, ...]
    """The other rows of this device, and of devices that use its efficiency; without all-reduces."""

    def errors(self) -> dict[Group, Errors]:
        """Return the errors of the held-out rows."""
        groups: dict[Group, list[float]] = defaultdict(list)
        for row in self.held_out:
            groups[group_of(row)].append(predicted_s(row, self.reached) / row.seconds)
        return {group: Errors.of(ratios) for group, ratios in sorted(groups.items())}

    def content(self) -> dict[str, Any]:
        """Return the content of the file of this fit."""
        return {"efficiency": asdict(self.reached), **self.evidence()}

    def evidence(self) -> dict[str, Any]:
        """Return what a file says beside the efficiency: rows, sources, licences, date and errors."""
        named = sorted({row.source for row in (*self.fitted, *self.held_out)})
        return {
            "device": self.fitted[0].gpu,
            "engines": sorted({row.engine for row in self.fitted}),
            "fitted_rows": len(self.fitted),
            "fitted_source": self.fitted[0].source,
            "sources": [dict(zip(("what", "address", "licence"), SOURCES[source], strict=True)) for source in named],
            "measurements_retrieved": RETRIEVED,
            "held_out_errors": [group._asdict() | asdict(errors) for group, errors in self.errors().items()],
        }


def group_of(row: Measurement) -> Group:
    """Return the group in which a row's error is stated."""
    return Group(row.source, row.engine, row.gpu, row.model, row.tp, row.kind)


def silicon_model(name: str) -> tuple[CostModel, DeviceFit]:
    """Return the cost model of a preset by a fit that is made now, and the fit.

    Raises:
        ConfigError: there is no such preset, or its model does not fit into the memory of its devices.
    """
    fit = fit_device(fit_of(name), load())
    return preset(name, fit.reached), fit


def write_fits(folder: Path = FITS) -> list[DeviceFit]:
    """Fit all devices to the measurements of the repository, write one file for each, and return the fits."""
    rows = load()
    fits = [fit_device(name, rows) for name in FIT_NAMES]
    for fit in fits:
        text = json.dumps(fit.content(), indent=1, ensure_ascii=False)
        (folder / f"{fit.name}.json").write_text(text + "\n", encoding="utf-8")
    return fits


def fit_device(name: str, rows: Sequence[Measurement]) -> DeviceFit:
    """Fit the efficiency of a measured device, or of an engine of the past (``engine-2023``).

    Raises:
        ConfigError: nothing was measured there.
    """
    device, source = OLD_ENGINE.get(name, (name, FITTED_SOURCES.get(name, "aic")))
    steps = [row for row in rows if row.kind != "all_reduce" and (row.source == "distserve") == (source == "distserve")]
    here = [row for row in steps if DEVICES[SAME_DEVICE.get(row.gpu, row.gpu)].measured_on == device]
    fitted = _fitted_rows([row for row in here if row.gpu == device and row.source == source])
    if not fitted:
        raise ConfigError(f"no steps were measured on {name!r}; choose one of: {', '.join(FIT_NAMES)}")
    link, all_reduce_s = _link([row for row in rows if row.gpu == device and row.kind == "all_reduce" and row.tp == 4])
    reached = _solve(fitted, link, all_reduce_s)
    taken = set(map(id, fitted))
    return DeviceFit(name, reached, tuple(fitted), tuple(row for row in here if id(row) not in taken))


def _fitted_rows(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return the white squares of each model and phase, at the model's usual number of ranks."""
    boards: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for row in rows:
        if row.kind in FITTED_KINDS and row.tp == MODELS[row.model].tensor_parallel:
            boards[row.model, row.kind].append(row)
    chosen = []
    for board in boards.values():
        tokens, contexts = (sorted({getattr(row, axis) for row in board}) for axis in ("tokens", "context"))
        chosen += [row for row in board if (tokens.index(row.tokens) + contexts.index(row.context)) % 2 == 0]
    return chosen


def _link(rows: Sequence[Measurement]) -> tuple[float, float]:
    """Return the share of the link and the least time of all-reduces, with the least relative errors."""
    if not rows:
        return ASSUMED_LINK
    seconds = np.array([row.seconds for row in rows])
    sent = np.array([2 * (row.tp - 1) / row.tp * row.tokens * 8192 * 2 for row in rows])
    factors = np.stack([np.ones(len(rows)), sent], axis=1) / seconds[:, None]
    (least_s, byte_s), *_ = np.linalg.lstsq(factors, np.ones(len(rows)), rcond=None)
    return _rounded(1 / (float(byte_s) * DEVICES[rows[0].gpu].device_link)), _rounded(float(least_s))


def _solve(rows: Sequence[Measurement], link: float, all_reduce_s: float) -> Efficiency:
    """Return the efficiency with the least squares of the logarithm of predicted over measured times."""
    counts: Mapping[tuple[str, str], int] = _counts(rows)
    weights = np.array([counts[row.model, row.kind] ** -0.5 for row in rows])
    measured = np.array([row.seconds for row in rows])

    chunked = any(row.kind == "prefill" and row.context for row in rows)

    def reached(logarithms: Any) -> Efficiency:
        numbers = dict(zip(FREE, np.clip(np.exp(logarithms), SMALLEST, LARGEST).tolist(), strict=True))
        if not chunked:  # prompts without a context hardly show what their attention takes
            numbers["attention"] = numbers["compute"]
        return Efficiency(**numbers, link=link, all_reduce_s=all_reduce_s)

    def residuals(logarithms: Any) -> Any:
        efficiency = reached(logarithms)
        costs = {key: cost_of(row, efficiency) for row in rows for key in [(row.model, row.tp)]}
        seconds = [costs[row.model, row.tp].step_s(*map(_whole, row.work)) for row in rows]
        return weights * np.log(np.array(seconds) / measured)

    bounds = (np.log(SMALLEST), np.log(LARGEST))
    found = least_squares(residuals, np.log(START), bounds=bounds, x_scale=0.1, xtol=1e-12, ftol=1e-12)
    numbers = {field.name: _rounded(getattr(reached(found.x), field.name)) for field in fields(Efficiency)}
    return Efficiency(**numbers)


def _counts(rows: Iterable[Measurement]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        counts[row.model, row.kind] += 1
    return counts


def _whole(number: float) -> int:
    return round(number)


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
