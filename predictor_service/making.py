"""Predictors as the configuration wants them."""

from pathlib import Path
from typing import Any

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.errors import ConfigError
from cluster.learnt_store import LearntStore
from predictor_service.client import ForecastClient, ForecastService
from predictor_service.predictor import Predictor
from predictor_service.shared import SharedPredictor
from predictor_service.statistics_model import StatisticsModel

SPACE = "//predictor"
"""What is learnt is shared under this name; no model's id: what a model's programs are like is told by their source."""


def shared_predictor(config: CaesuraConfig, clock: Clock, writer: str, trained: Any = None) -> SharedPredictor:
    """Statistics that are shared under ``writer``'s name, and if there is one a trained model.

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
    durations = trained if hasattr(trained, "durations") else None
    predictor = Predictor(StatisticsModel(), trained, durations)
    return SharedPredictor(predictor, store, config.predictor.share_s, clock)


def forecast_client(
    config: CaesuraConfig, clock: Clock, writer: str, service: ForecastService | None
) -> ForecastClient | None:
    """An ingress's client; None: nothing is forecast.

    Raises:
        ConfigError: the store's URL cannot be used.
    """
    if config.predictor.mode == "none":
        return None
    local = shared_predictor(config, clock, writer)
    return ForecastClient(local, service, deadline_s=config.predictor.deadline_s, clock=clock)


def trained_model(bundle: str | None) -> Any:
    """The model of a bundle; None: there is none.

    Raises:
        ConfigError: it cannot be used.
    """
    if bundle is None:
        return None
    raise ConfigError(f"predictor.bundle: {Path(bundle)}: cannot be read yet")
