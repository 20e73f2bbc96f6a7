"""An ingress's forecasts as the configuration wants them; the only place where they meet Ray."""

from ray.serve.handle import DeploymentHandle

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.forecasting import Forecasts, NoForecasts
from cluster.observing.forecasts import ForecastMetrics
from cluster.observing.meter import Meter
from predictor_service.making import forecast_client
from predictor_service.service import ServiceHandle


def forecasts(
    config: CaesuraConfig, clock: Clock, name: str, predictor: DeploymentHandle | None
) -> Forecasts | NoForecasts:
    """The parts, put together.

    Args:
        config: the whole configuration.
        clock: measures pauses and rests.
        name: of this ingress process.
        predictor: the service; None: there is none.

    Raises:
        ConfigError: the store's URL cannot be used.
    """
    client = forecast_client(config, clock, name, None if predictor is None else ServiceHandle(predictor))
    if client is None:
        return NoForecasts()
    metrics = ForecastMetrics(Meter(enabled=config.metrics.enabled), config.predictor.mode)
    return Forecasts(client, clock, config.control.idle_program_s, config.model.id, metrics)
