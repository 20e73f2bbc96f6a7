"""Models as bundles: any registered one is written, and read by what the bundle says it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.registry import PREDICTORS
from predictor_service.bundle import NOTE, Bundle, Origin, read_bundle, write_bundle
from predictor_service.statistics_model import FILE, VERSION, StatisticsModel


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model with what its bundle says of it."""

    name: str
    model: Any
    """Answers what models of its name answer, see `predictor_service.model`."""
    origin: Origin


def save_model(directory: Path, stored: StoredModel) -> None:
    """Write a bundle.

    Raises:
        ConfigError: it cannot be written.
    """
    if isinstance(stored.model, StatisticsModel):
        parts = {FILE: stored.model.to_bytes()}
        write_bundle(directory, Bundle(stored.name, VERSION, stored.origin, parts=parts))
    else:
        stored.model.save(directory, stored.origin)


def load_model(directory: Path) -> StoredModel:
    """What `save_model` wrote.

    Raises:
        ConfigError: it is no whole bundle of a registered model in this version; names file and field.
    """
    bundle = read_bundle(directory)
    if bundle.model not in PREDICTORS:
        raise ConfigError(f"{directory / NOTE}: model: is {bundle.model!r}, not one of: {', '.join(PREDICTORS)}")
    return StoredModel(bundle.model, PREDICTORS.load(bundle.model).load(directory), bundle.origin)
