"""How the model `tabular` is learnt.

Statistics are fitted first. The networks see only forecasts of statistics that were fitted without the row's own
group of programs, as they will when they serve; otherwise they would learn to trust what the statistics learnt by
heart.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Floats
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.network import TURN_COUNT_EDGES, Networks
from predictor_service.network_training import Rows, Target, TrainingSettings, train_networks
from predictor_service.statistics_model import StatisticsModel
from predictor_service.tabular import Inputs, TabularModel, pause_inputs, turn_inputs

FOLDS = 5
"""Parts of the groups. The statistics that a part sees are fitted to the others; the last one says when to stop."""
MOST_TURNS = 60_000
"""To learn from: with more, so many are drawn, program by program."""
LEAST_ROWS = 20
"""To learn from, and as many to stop by."""


def fit_tabular(programs: Sequence[ProgramExample], seed: int = 0) -> TabularModel:
    """See `TabularModel.fit`."""
    drawn = _bounded(programs, seed)
    folds = [[program for program in drawn if fold_of(program.split_group, seed) == fold] for fold in range(FOLDS)]
    turns: list[tuple[list[TurnExample], Inputs]] = []
    pauses: list[tuple[list[TurnExample], Inputs]] = []
    for fold, inside in enumerate(folds):
        others = [program for number, part in enumerate(folds) if number != fold for program in part]
        statistics = _fitted(others)
        rows = [turn for program in inside for turn in program.turns]
        paused = [turn for turn in rows if turn.pause_outcome is not None]
        turns.append((rows, turn_inputs([row.context for row in rows], statistics)))
        pauses.append((paused, pause_inputs([row.pause for row in paused if row.pause is not None], statistics)))
    settings = TrainingSettings(seed=seed)
    return TabularModel(
        _fitted(programs),
        _networks("turns", turns, _turn_rows, settings),
        _networks("pauses", pauses, _pause_rows, settings),
    )


def fold_of(group: str, seed: int) -> int:
    """Of a group, by itself: the same whatever the others are, and independent of the split for testing."""
    digest = blake2b(f"fold/{seed}/{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % FOLDS


def _fitted(programs: Sequence[ProgramExample]) -> StatisticsModel:
    return StatisticsModel.fit(programs)


def _bounded(programs: Sequence[ProgramExample], seed: int) -> list[ProgramExample]:
    kept: list[ProgramExample] = []
    turns = 0
    for index in np.random.default_rng(seed).permutation(len(programs)):
        program = programs[int(index)]
        if kept and turns + len(program.turns) > MOST_TURNS:
            break
        kept.append(program)
        turns += len(program.turns)
    return kept


def _networks(
    what: str,
    folds: Sequence[tuple[list[TurnExample], Inputs]],
    rows_of: Callable[[Sequence[TurnExample], Inputs], Rows],
    settings: TrainingSettings,
) -> Networks:
    fit = rows_of([row for rows, _ in folds[:-1] for row in rows], _joined([inputs for _, inputs in folds[:-1]]))
    held_out = rows_of(*folds[-1])
    if min(len(fit.features), len(held_out.features)) < LEAST_ROWS:
        raise ConfigError(
            f"too little to learn from: {len(fit.features)} {what} in {FOLDS - 1} of {FOLDS} parts of the groups and "
            f"{len(held_out.features)} in the last one; the model tabular needs {LEAST_ROWS} in each"
        )
    return train_networks(fit, held_out, settings)


def _joined(parts: Sequence[Inputs]) -> Inputs:
    names = parts[0].priors
    return Inputs(
        np.concatenate([part.features for part in parts]),
        {name: np.concatenate([part.priors[name] for part in parts]) for name in names},
    )


def _turn_rows(rows: Sequence[TurnExample], inputs: Inputs) -> Rows:
    sources = [row.context.source for row in rows]
    lengths = np.array([row.outcome.output_tokens for row in rows], dtype=np.float64)
    tokens = np.array([row.remaining[0] for row in rows], dtype=np.float64)
    turns = np.array([row.remaining[1] for row in rows], dtype=np.float64)
    return Rows(
        inputs.features,
        {
            "lengths": _target(LENGTH_EDGES, lengths, sources, inputs.priors["lengths"]),
            "remaining": _target(LENGTH_EDGES, tokens, sources, inputs.priors["remaining"]),
            "turns": _target(TURN_COUNT_EDGES, turns, sources, None),
        },
    )


def _pause_rows(rows: Sequence[TurnExample], inputs: Inputs) -> Rows:
    sources = [row.context.source for row in rows]
    outcomes = [row.pause_outcome for row in rows]
    durations = _known(outcome.duration_s if outcome else None for outcome in outcomes)
    returned = _known(outcome.returned_tokens if outcome else None for outcome in outcomes)
    return Rows(
        inputs.features,
        {
            "durations": _target(DURATION_EDGES, durations, sources, inputs.priors["durations"]),
            "returned": _target(LENGTH_EDGES, returned, sources, inputs.priors["returned"]),
        },
    )


def _known(values: Iterable[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _target(edges: Floats, values: Floats, sources: Sequence[str], prior: Floats | None) -> Target:
    """Errors are measured by the mean of the row's source: else the source of the largest values would count alone."""
    scale = np.ones(len(values))
    names: NDArray[np.str_] = np.array(sources, dtype=np.str_)
    for source in set(sources):
        inside = (names == source) & np.isfinite(values)
        if inside.any():
            scale[names == source] = max(float(values[inside].mean()), float(edges[1] - edges[0]))
    return Target(edges, values, scale, prior)
