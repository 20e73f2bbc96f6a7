"""Predictors as the configuration wants them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.learnt_store import LearntStore
from predictor_service.client import ForecastClient, ForecastService
from predictor_service.predictor import Predictor
from predictor_service.shared import SharedPredictor
from predictor_service.statistics_model import StatisticsModel

SPACE = "//predictor"
"""What is learnt is shared under this name; no model's id: what a model's programs are like is told by their source."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What was learnt before a cluster began. Nothing, by default."""

    model: Any = None
    """A LengthModel, and a DurationModel if it has `durations`; None: there are statistics only."""
    statistics: bytes | None = None
    """`StatisticsModel.to_bytes`."""

    @classmethod
    def of(cls, bundle: str | None) -> "Trained":
        """What a bundle has.

        Raises:
            ConfigError: it cannot be used; names the file.
        """
        if bundle is None:
            return cls()
        # Reading bundles takes libraries that an ingress without one has no use for.
        from predictor_service.model_files import load_model

        model = load_model(Path(bundle)).model
        if isinstance(model, StatisticsModel):
            return cls(None, model.to_bytes())
        own = getattr(model, "statistics", None)
        return cls(model, own.to_bytes() if isinstance(own, StatisticsModel) else None)

    def predictor(self) -> Predictor:
        """One that goes on learning from there."""
        statistics = StatisticsModel()
        model = self.model
        if hasattr(model, "with_prior"):  # it corrects statistics: those that learn while they serve
            model = model.with_prior(statistics)
        durations = model if hasattr(model, "durations") else None
        return Predictor(statistics, model, durations, self.statistics)


def shared_predictor(config: CaesuraConfig, clock: Clock, writer: str, trained: Trained) -> SharedPredictor:
    """One that is shared under ``writer``'s name.

    Raises:
        ConfigError: the store's URL cannot be used.
    """
    store = LearntStore(
        config.store.url,
        space=SPACE,
        writer=writer,
        timeout_s=config.store.timeout_s,
        expiry_s=config.store.expiry_s,
        clock=clock,
    )
    return SharedPredictor(trained.predictor(), store, config.predictor.share_s, clock)


def forecast_client(
    config: CaesuraConfig, clock: Clock, writer: str, service: ForecastService | None
) -> ForecastClient | None:
    """An ingress's client; None: nothing is forecast.

    Raises:
        ConfigError: the store's URL or the bundle cannot be used.
    """
    if config.predictor.mode == "none":
        return None
    # In time it answers only from statistics: those of the bundle, if this machine has it.
    statistics = Trained(None, Trained.of(config.predictor.bundle).statistics)
    local = shared_predictor(config, clock, writer, statistics)
    return ForecastClient(local, service, deadline_s=config.predictor.deadline_s, clock=clock)
