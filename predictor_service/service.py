"""The predictor service: a Ray Serve deployment over a plain predictor, and its client over a Ray handle.

Requests that wait at the same time are answered as one batch. The statistics are written to the store periodically and
at the end. A replica that starts reads the statistics of all. The service needs no GPU.
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

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.program import Prediction
from cluster.core.supervision import SupervisedTasks
from predictor_service.client import ServiceOverloaded, ServiceUnreachable
from predictor_service.model import Observation, TurnContext
from predictor_service.shared import Trained, shared_predictor

DEPLOYMENT = "Predictor"
MOST_TOGETHER = 4
"""Largest batch of requests. A larger one would delay its first request."""
MOST_AT_WORK = 256
"""Ongoing requests of a replica. Further requests wait at the ingresses."""
HEALTH_CHECK_PERIOD_S = 5.0


class PredictorServer:
    """One replica of the service."""

    async def __init__(self, config: CaesuraConfig) -> None:  # type: ignore[misc]
        trained = Trained.of(config.predictor.bundle)
        clock = MonotonicClock()
        self._shared = shared_predictor(config, clock, f"predictor-{uuid4().hex}", trained)
        self._tasks = SupervisedTasks("predictor service", clock)
        # The others' statistics are read before the first request, or later if the store does not answer.
        await self._shared.exchange()
        self._tasks.start("exchange", self._shared.exchange_for_ever)

    async def __del__(self) -> None:
        """Called by Ray Serve when this process is to end."""
        await self._tasks.aclose()
        await self._shared.aclose()

    @serve.batch(  # type: ignore[untyped-decorator]
        max_batch_size=MOST_TOGETHER, batch_wait_timeout_s=0.0
    )
    async def predict(self, turns: list[TurnContext]) -> list[Prediction]:
        """Predict turns. A caller passes a single turn, and Ray Serve makes a batch of the waiting calls."""
        return self._shared.predict(turns)

    async def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from turns, pauses and programs that replicas observed. Invalid ones are counted and change nothing."""
        self._shared.learn(observations)

    async def check_health(self) -> None:
        """Raise if Ray should replace this process."""
        if not self._tasks.healthy:
            raise RuntimeError(f"background tasks keep failing: {', '.join(self._tasks.failed)}")

    async def view(self) -> dict[str, Any]:
        """Return the state for operators."""
        return self._shared.view()


def predictor_application(config: CaesuraConfig) -> Application:
    """Make the deployment of the service, bound to its configuration."""
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
    """Calls the predictor service over a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def predict(self, turn: TurnContext) -> Prediction:
        """See `PredictionService`."""
        prediction: Prediction = await _answer(self._handle.predict.remote(turn))
        return prediction

    async def observe(self, observations: Sequence[Observation]) -> None:
        """See `PredictionService`."""
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
            raise  # the service itself raised: it is reachable, but fails
        raise ServiceUnreachable(str(error)) from error
