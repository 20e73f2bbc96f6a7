"""The handlers of the routes of operators, under `/admin`."""

from http import HTTPStatus
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.ray_errors import as_http_error
from cluster.api.validation import validated
from cluster.config.schema import CaesuraConfig, PolicyConfig
from cluster.core.errors import UpstreamFailed
from cluster.core.lineage import LineageIndex
from cluster.dispatch.predictions import NullPredictions, Predictions
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.http.requests import TurnReader
from cluster.http.routes import drain
from cluster.http.services import ProgramService
from cluster.http.usage import usage_of_day
from cluster.http.weights import WeightRoutes


class Administration:
    """These handlers of an ingress. The docstring of a handler appears in /docs."""

    _config: CaesuraConfig
    _fleet: ReplicaClients
    _lineage: LineageIndex
    _predictions: Predictions | NullPredictions
    _reader: TurnReader
    _service: ProgramService
    _weights: WeightRoutes

    async def policy(self) -> Response:
        """Return the policy of each replica."""
        return _per_replica(await self._fleet.broadcast("control", "policy", {}))

    async def set_policy(self, request: Request) -> Response:
        """Switch the policy of every replica, to `{"name": ..., "parameters": {...}}`. Keys that are left out
        have the configuration's values if it has the same policy. A replica that starts later has the configuration's
        policy.
        """
        body = await self._reader.json(request)
        configured = self._config.policy
        if body.get("name") == configured.name:
            body = configured.model_dump(exclude_none=True) | body
        policy = validated(PolicyConfig, body)
        return _per_replica(await self._fleet.broadcast("set_policy", policy.model_dump(exclude_none=True)))

    async def reset(self) -> Response:
        """End all holds and empty the prefix caches of all replicas. The status is 409 if a replica could not, with its
        reason.
        """
        answers = await self._fleet.broadcast("reset_caches")
        refused = any(isinstance(answer, dict) and answer.get("reset") is False for answer in answers)
        return _per_replica(answers, HTTPStatus.CONFLICT if refused else HTTPStatus.OK)

    async def statistics(self) -> Response:
        """Return the current numbers of each replica's scheduler."""
        return _per_replica(await self._fleet.broadcast("snapshot"))

    async def drain(self, request: Request) -> Response:
        """Begin or end the draining of a replica: `{"replica": id, "drain": true}`. Programs migrate at their next
        pause.
        """
        return await drain(self._fleet, await self._reader.json(request))

    async def router(self) -> Response:
        """Return the state of this ingress's router: programs, waiting turns, replicas and counters."""
        found = {how.value: n for how, n in self._lineage.counters.items()}
        return JSONResponse(self._fleet.view() | {"programs_found": found})

    async def usage(self, day: str | None = None) -> Response:
        """Return the turns, the tokens and the seconds of GPUs of each program in a day (UTC, `YYYY-MM-DD`; today if
        it is missing), as CSV.
        """
        return await usage_of_day(self._service.usage, day, time)

    async def predictor(self) -> Response:
        """Return the state of this ingress's predictions: their sources, their errors, and the learnt statistics."""
        return JSONResponse(self._predictions.view())

    async def weights(self) -> Response:
        """Return the version of the weights that the replicas of each model should have, and that each has."""
        return await self._weights.show()

    async def update_weights(self, request: Request) -> Response:
        """Load the weights of a folder on all replicas of a model: `{"version": ..., "path": ..., "model": ...}`. Turns
        under way wait, and go on with the new weights. A replica that cannot load them is named and replaced.
        """
        return await self._weights.update(await self._reader.json(request))

    async def pause(self, request: Request) -> Response:
        """Let all replicas of a model, or of all models (`{}`), stop between two steps. Turns wait until `resume`."""
        return await self._weights.set_paused(await self._reader.json(request), paused=True)

    async def resume(self, request: Request) -> Response:
        """Let the replicas of a model, or of all models (`{}`), go on."""
        return await self._weights.set_paused(await self._reader.json(request), paused=False)


def _per_replica(answers: list[Any], status: int = HTTPStatus.OK) -> Response:
    """Return each replica's answer, with ``status`` if none failed.

    Raises:
        UpstreamFailed: a replica failed. The status is that of the first failure.
    """
    failures = [as_http_error(answer) for answer in answers if isinstance(answer, BaseException)]
    results = [{"error": as_http_error(a).message} if isinstance(a, BaseException) else a for a in answers]
    if failures:
        raise UpstreamFailed(f"{len(failures)} of {len(answers)} replicas failed: {results}", status=failures[0].status)
    return JSONResponse({"replicas": results}, status)
