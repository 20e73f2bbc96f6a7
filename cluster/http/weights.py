"""The routes with which a trainer pauses generation and changes the weights: `/admin/pause`, `/resume`, `/weights`."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from cluster.api.openai import RETRY_AFTER_S, no_model
from cluster.api.ray_errors import as_http_error
from cluster.api.validation import validated
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import BadRequest, ControlTimeout, HttpError, Overloaded, UpstreamFailed
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.store.client import StoreUnavailable
from cluster.store.weights import WeightsStore, WeightsTarget, refused_with_store

UPDATE_SLACK_S = 60.0
"""Seconds that an update may take beside the loading of the weights."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must have printable characters only")
    return text


class PauseRequest(BaseModel):
    """The body of `POST /admin/pause` and of `POST /admin/resume`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    """The model whose replicas are meant. None: those of all models."""


class WeightsRequest(BaseModel):
    """The body of `POST /admin/weights`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    """The model. It may be left out if one is served."""
    version: Annotated[str, AfterValidator(_printable)] = Field(min_length=1, max_length=256)
    path: Annotated[str, AfterValidator(_printable)] = Field(min_length=1, max_length=4096)


class WeightRoutes:
    """The handlers of the routes.

    Args:
        fleet: calls the replicas.
        config: the whole configuration.
        clock: measures outages of the store.
    """

    def __init__(self, fleet: ReplicaClients, config: CaesuraConfig, clock: Clock) -> None:
        self._fleet = fleet
        self._served = config.served
        redis = config.redis
        self._stores = {
            model: WeightsStore(redis.url, model=model, timeout_s=redis.timeout_s, clock=clock)
            for model in self._served
        }

    @property
    def failed(self) -> tuple[str, ...]:
        """There are no background loops."""
        return ()

    async def aclose(self) -> None:
        """Close the connections to Redis of every model's store."""
        await asyncio.gather(*(store.close() for store in self._stores.values()))

    async def show(self) -> Response:
        """Return by model the weights that all replicas should have, and those that each has.

        Raises:
            Overloaded: the store does not answer.
        """
        models = []
        for model in self._served:
            target = await self._target(model)
            models.append({"model": model, **_public(target), "replicas": await self._now(model)})
        return JSONResponse({"models": models})

    async def set_paused(self, body: Mapping[str, Any], *, paused: bool) -> Response:
        """Let the replicas stop generating between two steps, or go on. Turns under way wait.

        Raises:
            BadRequest: there is no such model (404).
            Overloaded: the store does not answer. Of several models, some may follow later.
            UpstreamFailed: a replica failed. The others, of all models, have done it.
        """
        request = validated(PauseRequest, body)
        models = list(self._served) if request.model is None else [self._known(request.model)]
        for model in models:
            await self._stored(self._stores[model].set_paused(paused))
        targets = {model: await self._target(model) for model in models}
        calls = (self._tell(model, target) for model, target in targets.items())
        told = await asyncio.gather(*calls, return_exceptions=True)
        _check_succeeded([one for answers in told for one in (answers if isinstance(answers, list) else [answers])])
        return JSONResponse(
            {
                "models": [
                    {"model": model, **_public(targets[model]), "replicas": answers}
                    for model, answers in zip(models, told, strict=True)
                ]
            }
        )

    async def update(self, body: Mapping[str, Any]) -> Response:
        """Load weights from a folder on all replicas of a model. Turns under way wait, and go on with the new weights.

        Raises:
            BadRequest: a field is invalid, the model has a KV store, or a replica cannot load the folder. Nothing was
                changed.
            Overloaded: the store does not answer. If it had the new version already, replicas will load it.
            UpstreamFailed: a replica could not load the weights. It is named, and it is replaced. The others have them.
        """
        request = validated(WeightsRequest, body)
        if request.model is None and len(self._served) > 1:
            raise BadRequest(f"model: choose one of: {', '.join(self._served)}", param="model")
        model = next(iter(self._served)) if request.model is None else self._known(request.model)
        if (kv_store := self._served[model].replicas.kv_store) is not None:
            raise refused_with_store(kv_store.name)
        checks = await self._fleet.broadcast_to(model, "check_weights", request.path, within_s=UPDATE_SLACK_S)
        for refusal in checks:
            if refusal is not None:
                raise refusal if isinstance(refusal, HttpError) else as_http_error(refusal)
        await self._stored(self._stores[model].set_weights(request.version, request.path))
        target = await self._target(model)
        answers = await self._tell(model, target)
        _check_succeeded(answers)
        return JSONResponse({"model": model, **_public(target), "replicas": answers})

    async def _tell(self, model: str, target: WeightsTarget) -> list[Any]:
        """Let the replicas of a model follow a target. Return each one's answer or exception."""
        within_s = self._served[model].replicas.start_timeout_s + UPDATE_SLACK_S
        try:
            return await self._fleet.broadcast_to(model, "follow_weights", target, within_s=within_s)
        except ControlTimeout as error:
            return [ControlTimeout(f"{model}: {error}")]

    def _known(self, model: str) -> str:
        if model not in self._served:
            raise no_model(model)
        return model

    async def _now(self, model: str) -> list[Any]:
        answers = await self._fleet.broadcast_to(model, "weights")
        return [{"error": as_http_error(one).message} if isinstance(one, BaseException) else one for one in answers]

    async def _target(self, model: str) -> WeightsTarget:
        try:
            return await self._stores[model].read()
        except StoreUnavailable as error:
            raise _no_store() from error

    async def _stored(self, write: Any) -> None:
        try:
            await write
        except StoreUnavailable as error:
            raise _no_store() from error


def _no_store() -> Overloaded:
    return Overloaded(
        "Redis does not answer; repeat the request", code="store_unavailable", retry_after_s=RETRY_AFTER_S
    )


def _public(target: WeightsTarget) -> dict[str, Any]:
    return {"version": target.version, "path": target.path, "paused": target.paused}


def _check_succeeded(answers: Sequence[Any]) -> None:
    """Check the answers of replicas.

    Raises:
        UpstreamFailed: one failed. The message names each that did.
    """
    failures = [as_http_error(one).message for one in answers if isinstance(one, BaseException)]
    if failures:
        message = f"{len(failures)} of {len(answers)} replicas failed: {'; '.join(failures)}"
        raise UpstreamFailed(message, status=HTTPStatus.BAD_GATEWAY, code="replica_failed")
