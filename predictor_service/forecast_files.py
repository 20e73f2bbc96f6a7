"""Forecasts of recorded programs by a trained model, and the files that keep them: a JSON line for each program."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from cluster.core.errors import ConfigError
from cluster.core.program import Prediction
from predictor_service.bundle import StoredModel
from predictor_service.examples import ProgramExample, split
from predictor_service.predictor import Predictor
from predictor_service.statistics_model import StatisticsModel

Forecasts = Mapping[str, tuple[Prediction, ...]]
"""Forecasts by program, one for each turn."""


class _Row(msgspec.Struct):
    """A line of a file."""

    program_id: str
    turns: tuple[Prediction, ...]


def predicted(model: Any, learnt: Sequence[ProgramExample], asked: Sequence[ProgramExample]) -> Forecasts:
    """Forecast programs with a fitted model. What it does not predict, statistics of ``learnt`` predict."""
    statistics = model if isinstance(model, StatisticsModel) else StatisticsModel.fit(learnt)
    trained = None if model is statistics else model
    predictor = Predictor(statistics, trained, trained if hasattr(trained, "durations") else None)
    return {one.program_id: tuple(predictor.predict([turn.context for turn in one.turns])) for one in asked}


def held_out_forecasts(stored: StoredModel, programs: Sequence[ProgramExample]) -> Forecasts:
    """Forecast those of ``programs`` whose groups the model was not trained on.

    Raises:
        ConfigError: the model was trained on all groups, or a side of its split is empty.
    """
    seed, share = stored.origin.split_seed, stored.origin.test_share
    if seed is None:
        raise ConfigError(f"--bundle: the model {stored.name} was trained on all programs: none is left to forecast")
    learnt, asked = split(programs, seed, share)
    if not learnt or not asked:
        raise ConfigError(f"--traces: of {len(programs)} programs, the model's split leaves nothing to learn or to ask")
    return predicted(stored.model, learnt, asked)


def write_forecasts(path: Path, forecasts: Forecasts) -> None:
    """Write a file of forecasts."""
    with path.open("w", encoding="utf-8") as file:
        for name, turns in forecasts.items():
            file.write(json.dumps({"program_id": name, "turns": [asdict(turn) for turn in turns]}) + "\n")


def read_forecasts(path: Path) -> Forecasts:
    """Read a file of forecasts.

    Raises:
        ConfigError: it cannot be read, or a line is no program's forecasts; the message names the line.
    """
    found: dict[str, tuple[Prediction, ...]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--forecasts {path}: cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=_Row)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--forecasts {path}:{number}: {error}") from error
        if not all(_sensible(turn) for turn in row.turns):
            raise ConfigError(f"--forecasts {path}:{number}: a number is negative or not finite")
        if row.program_id in found:
            raise ConfigError(f"--forecasts {path}:{number}: program_id: {row.program_id!r} is on an earlier line too")
        found[row.program_id] = row.turns
    return found


def _sensible(turn: Prediction) -> bool:
    rows = (asdict(turn), *map(asdict, turn.tools))
    numbers = [value for row in rows for value in row.values() if isinstance(value, float | int)]
    return all(isfinite(number) and number >= 0 for number in numbers)
