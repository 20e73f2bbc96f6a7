"""The predictor service: a Ray Serve deployment over a plain predictor, and how an ingress reaches it.

Questions that come together are answered together. What is learnt is written to the store every few seconds and at the
end; a replica that starts, or starts again, reads what all have learnt. It needs no GPU.
"""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from ray import serve
from ray.exceptions import RayError
from ray.serve.deployment import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.clock import MonotonicClock
from cluster.config import CaesuraConfig
from cluster.program import Forecasted
from predictor_service.client import ServiceOverloaded, ServiceUnreachable
from predictor_service.context import TurnContext
from predictor_service.making import Trained, shared_predictor
from predictor_service.observation import Observation

DEPLOYMENT = "Predictor"
MOST_TOGETHER = 4
"""Questions that are answered together: more would keep the first of them waiting."""
MOST_AT_WORK = 256
"""Questions that a replica has taken; more wait at the ingresses."""
HEALTH_CHECK_PERIOD_S = 5.0


class PredictorServer:
    """One replica of the service."""

    async def __init__(self, config: CaesuraConfig) -> None:  # type: ignore[misc]
        trained = Trained.of(config.predictor.bundle)
        self._shared = shared_predictor(config, MonotonicClock(), f"predictor-{uuid4().hex}", trained)
        # What others have learnt is there before the first question; without the store it comes later.
        await self._shared.exchange()
        self._sharing = asyncio.create_task(self._shared.exchange_for_ever())

    async def __del__(self) -> None:
        """Called by Ray Serve when this process is to end."""
        self._sharing.cancel()
        await self._shared.aclose()

    @serve.batch(  # type: ignore[untyped-decorator]
        max_batch_size=MOST_TOGETHER, batch_wait_timeout_s=0.0
    )
    async def forecast(self, turns: list[TurnContext]) -> list[Forecasted]:
        """Asked for one turn; answered with those that wait."""
        return self._shared.forecast(turns)

    async def observe(self, observations: Sequence[Observation]) -> None:
        """Learn."""
        self._shared.learn(observations)

    async def check_health(self) -> None:
        """Raises where this process should be replaced."""
        if self._sharing.done():
            raise RuntimeError("what is learnt is not shared any more")

    async def view(self) -> dict[str, Any]:
        """For operators."""
        return self._shared.view()


def predictor_application(config: CaesuraConfig) -> Application:
    """The deployment."""
    section = config.predictor
    deployment = serve.deployment(
        PredictorServer,
        name=DEPLOYMENT,
        num_replicas=section.replicas,
        max_ongoing_requests=MOST_AT_WORK,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        ray_actor_options={"num_cpus": section.cpus},
    )
    return deployment.bind(config)


class ServiceHandle:
    """The service over a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def forecast(self, turn: TurnContext) -> Forecasted:
        """See `ForecastService`."""
        forecast: Forecasted = await _answer(self._handle.forecast.remote(turn))
        return forecast

    async def observe(self, observations: Sequence[Observation]) -> None:
        """See `ForecastService`."""
        await _answer(self._handle.observe.remote(list(observations)))


async def _answer(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except BackPressureError as error:
        raise ServiceOverloaded(str(error)) from error
    except (RayError, DeploymentUnavailableError) as error:
        if getattr(error, "cause", None) is not None:
            raise  # the service's own exception: it is there, and broken
        raise ServiceUnreachable(str(error)) from error
