"""The replicas of all models, for the rest of an ingress."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from cluster.auth.tenants import kept_apart
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import HttpError, ReplicaGone
from cluster.core.program import ProgramIdentity
from cluster.core.supervision import SupervisedTasks
from cluster.core.turn import Continuation, TurnPiece
from cluster.dispatch.model_selection import ModelSelection
from cluster.dispatch.placement_service import PlacementService
from cluster.dispatch.predictions import NullPredictions, Predictions, WatchedAnswers
from cluster.dispatch.recording import RecordedAnswers, Recordings
from cluster.dispatch.replica_client import ReplicaClient
from cluster.dispatch.turn_client import TurnClient
from cluster.observing.trace_context import Traces
from cluster.store.placements import PlacementStore
from cluster.store.token_records import RecordBounds, TokenRecordStore

logger = logging.getLogger("ray.serve")

Result = TypeVar("Result")

CLASSES = "//classes"
"""Takes the place of a model's id in the store, for the models that were selected for programs. No model has this id.
"""


class ReplicaClients:
    """A client and a placement for each model.

    Args:
        replicas: a handle to the `ProgramServer`s of each model, by model.
        config: the whole configuration.
        clock: the clock of the routers.
        name: the name of this ingress process.
        predictions: predicts turns.
        traces: records turns and ends of programs.
        counts: returns the number of a model's turns that have ended, and of those that missed their SLO.
    """

    def __init__(
        self,
        replicas: Mapping[str, DeploymentHandle],
        config: CaesuraConfig,
        clock: Clock,
        name: str,
        predictions: Predictions | NullPredictions,
        traces: Traces,
        counts: Callable[[str], tuple[int, int]],
    ) -> None:
        served = config.served
        self._may_have_none = {model for model, own in served.items() if own.replicas.least == 0}
        self._name = name
        self._default = config.model.id
        self._adapters = config.adapters
        self._predictions = predictions
        self._traces = traces
        self._placements = {
            model: PlacementService(handle, served[model], clock, name, partial(counts, model))
            for model, handle in replicas.items()
        }
        self._turns = TurnClient()
        self.recordings = Recordings(record_store(config, clock), clock)
        self._clients = {
            model: ReplicaClient(
                handle,
                self._turns,
                self._placements[model].placer,
                self._placements[model].quarantine,
                config.limits.timeout_s,
                predictions,
                traces,
                self.recordings,
                may_have_none=model in self._may_have_none,
            )
            for model, handle in replicas.items()
        }
        self._homes = PlacementStore(
            config.redis.url,
            model=CLASSES,
            timeout_s=config.redis.timeout_s,
            expiry_s=config.limits.program_ttl_s,
            clock=clock,
        )
        self.classes = ModelSelection(config, self, self._homes)
        self._has_classes = bool(config.model_routing)
        self._tasks = SupervisedTasks("the models of programs", clock)

    @property
    def ours(self) -> bool:
        """Whether this ingress places programs. Otherwise Ray's own router places them by their keys."""
        return all(placement.ours for placement in self._placements.values())

    def open(self) -> None:
        """Begin to place programs."""
        for placement in self._placements.values():
            placement.open()
        self._predictions.open()
        self.recordings.open()
        if self._has_classes:
            self._tasks.start("keep the models of programs", self.classes.attend)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        routers = (f"{model}: {name}" for model, placing in self._placements.items() for name in placing.failed)
        return (*self._predictions.failed, *self.recordings.failed, *self._tasks.failed, *routers)

    async def aclose(self) -> None:
        """Stop. Programs keep their homes."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._turns.aclose)
            stack.push_async_callback(self._homes.close)
            stack.push_async_callback(self._tasks.aclose)
            stack.push_async_callback(self.recordings.aclose)
            for placement in self._placements.values():
                stack.push_async_callback(placement.aclose)
            stack.push_async_callback(self._predictions.aclose)

    def start_s(self) -> Mapping[str, float | None]:
        """Return by model the expected seconds until a turn starts. None: there is no replica."""
        return {model: placement.placer.start_s() for model, placement in self._placements.items()}

    def view(self) -> dict[str, Any]:
        """Return the placement by this ingress, for operators."""
        models = {model: placement.view() for model, placement in self._placements.items()}
        chosen = {reason.value: n for reason, n in self.classes.counters.items()}
        return {"ingress": self._name, "models": models, "classes": chosen}

    # --- turns --------------------------------------------------------------------------------------------------------

    def answers(
        self, method: str, body: dict[str, Any], headers: dict[str, str], identity: ProgramIdentity
    ) -> WatchedAnswers | RecordedAnswers:
        """Return the answer to a client's turn, as bytes. If a replica dies, another one continues the answer."""
        return self._of(body).answers(method, kept_apart(body, identity.tenant), headers, identity)

    async def plain(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        """Return the answer of any replica to a request that is no turn; see `ReplicaClient.plain`."""
        return await self._of(body).plain(method, body, headers)

    def turn(
        self,
        key: str | None,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        continuation: Continuation | None,
        headers: Mapping[str, str] | None = None,
        answers: Sequence[int] | None = None,
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """Return the pieces of a turn, not the bytes of an answer; see `ReplicaClient.turn`."""
        own = kept_apart(body, identity.tenant)
        return self._of(body).turn(key, own, identity, continuation, headers, answers)

    def _of(self, body: Mapping[str, Any]) -> ReplicaClient:
        named = body.get("model") or self._default
        return self._clients[self._adapters.get(named, named)]

    # --- the side channel ---------------------------------------------------------------------------------------------

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel on each model's replica that the program is bound to.

        Raises:
            Exception: what Ray or a replica raised, after all models have been asked.
        """
        if operation == "end":
            self._predictions.program_ended(key)
            self._traces.program_ended(key)
        _raise_first(await self._of_each(lambda client: client.tell(key, operation, payload)))

    async def extend(self, key: str, body: Mapping[str, Any], continuation: Continuation | None) -> str | None:
        """Let a replica compute a paused program's next prompt as far as it is known; see `ReplicaClient.extend`."""
        return await self._of(body).extend(key, body, continuation)

    async def story(self, key: str) -> dict[str, Any] | None:
        """Return what the first model that knows the program reports of it, or None.

        Raises:
            ControlTimeout: they did not answer, and no other model knows it.
        """
        stories = await self._of_each(lambda client: client.story(key))
        for story in stories:
            if story is not None and not isinstance(story, BaseException):
                return story
        _raise_first(stories)
        return None

    async def sessions(self, tenant: str, limit: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """Return what the replicas know of a tenant's programs.

        Args:
            tenant: the tenant's name.
            limit: largest number of programs of each replica.

        Returns:
            Pairs (model, a replica's answer), and the number of replicas or models that did not answer.
        """
        asked = {"tenant": tenant, "limit": limit}
        by_model = await self._of_each(lambda client: client.broadcast("control", "sessions", asked))
        found: list[tuple[str, dict[str, Any]]] = []
        missing = 0
        for model, answers in zip(self._clients, by_model, strict=True):
            for answer in [answers] if isinstance(answers, BaseException) else answers:
                if isinstance(answer, dict):
                    found.append((model, answer))
                else:
                    logger.warning("the programs of a replica of %s are not listed: %r", model, answer)
                    missing += 1
        return found, missing

    async def to(self, replica: str, method: str, *arguments: Any) -> Any:
        """Call a replica by its id.

        Raises:
            ReplicaGone: it is not there.
            ControlTimeout: it did not answer in time.
            Exception: what else Ray or the replica raised.
        """
        *others, last = self._clients.values()
        for client in others:
            with suppress(ReplicaGone):
                return await client.to(replica, method, *arguments)
        return await last.to(replica, method, *arguments)

    async def ready(self) -> None:
        """Return when a replica of each model has answered. Raise the error that prevents it.

        A model that may have no replica is not asked, since that would start one.
        """
        asked = (client for model, client in self._clients.items() if model not in self._may_have_none)
        _raise_first(await asyncio.gather(*(client.ready() for client in asked), return_exceptions=True))

    async def max_model_len(self, model: str) -> int | None:
        """Return the context window of a model in tokens, or None if no replica has reported it."""
        if model in self._may_have_none and self._placements[model].placer.start_s() is None:
            return None  # the question would start a replica
        return await self._clients[model].max_model_len()

    async def broadcast_to(self, model: str, method: str, *arguments: Any, within_s: float | None = None) -> list[Any]:
        """Call all replicas of a model; see `ReplicaClient.broadcast`."""
        return await self._clients[model].broadcast(method, *arguments, within_s=within_s)

    async def broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """Call all replicas of all models. Return each one's answer, or the exception that it raised.

        Raises:
            ControlTimeout: not all answered in time.
        """
        answers = await self._of_each(lambda client: client.broadcast(method, *arguments))
        return [one for of_model in _raise_first(answers) for one in of_model]

    async def _of_each(self, call: Callable[[ReplicaClient], Awaitable[Result]]) -> list[Result | BaseException]:
        """Make a call for each model, all at the same time.

        Return the results and exceptions. A failure stops no other call.
        """
        return await asyncio.gather(*(call(client) for client in self._clients.values()), return_exceptions=True)


def record_store(config: CaesuraConfig, clock: Clock) -> TokenRecordStore:
    """Return the store of recorded tokens."""
    records = config.records
    return TokenRecordStore(
        config.redis.url,
        timeout_s=config.redis.timeout_s,
        retention_s=records.retention_s,
        bounds=RecordBounds(records.program_bytes, records.tenant_bytes, records.total_bytes),
        clock=clock,
    )


def _raise_first(outcomes: Sequence[Result | BaseException]) -> list[Result]:
    """Return the results. If there are exceptions among them, raise the first."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
