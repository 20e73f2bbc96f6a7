"""The replicas of all models as the rest of an ingress sees them: each call goes to those of its model."""

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.errors import HttpError, ReplicaGone
from cluster.forecasting import Forecasts, NoForecasts, WatchedAnswers
from cluster.model_classes import ModelClasses
from cluster.observing.tracing import NoTraces, Traces
from cluster.placed_calls import Calls
from cluster.placement_store import PlacementStore
from cluster.placing import Placing
from cluster.program import ProgramIdentity
from cluster.replica_calls import ReplicaCalls
from cluster.tenants import kept_apart
from cluster.turn import Continuation, TurnPiece

CLASSES = "//classes"
"""Where the store keeps which models programs were led to; no model's id, which it stands in place of."""


class Fleet:
    """All models, each with its own places.

    Args:
        replicas: by model, a handle to its `ProgramServer`s.
        config: the whole configuration.
        clock: all of the routers' time.
        name: of this ingress process.
        forecasts: what is expected of turns.
        traces: are told of turns and of the ends of programs.
    """

    def __init__(
        self,
        replicas: Mapping[str, DeploymentHandle],
        config: CaesuraConfig,
        clock: Clock,
        name: str,
        forecasts: Forecasts | NoForecasts,
        traces: Traces | NoTraces,
    ) -> None:
        served = config.served
        self._name = name
        self._default = config.model.id
        self._forecasts = forecasts
        self._traces = traces
        self._placings = {model: Placing(handle, served[model], clock, name) for model, handle in replicas.items()}
        self._calls = {
            model: ReplicaCalls(
                handle,
                self._placings[model].places,
                self._placings[model].quarantine,
                config.control.timeout_s,
                forecasts,
                traces,
            )
            for model, handle in replicas.items()
        }
        self._homes = PlacementStore(
            config.store.url,
            model=CLASSES,
            timeout_s=config.store.timeout_s,
            expiry_s=config.control.idle_program_s,
            clock=clock,
        )
        self.classes = ModelClasses(config, self, self._homes)

    @property
    def ours(self) -> bool:
        """Whether programs are placed; else they go where Ray's own router sends their keys."""
        return all(placing.ours for placing in self._placings.values())

    def open(self) -> None:
        """Begin to look at the replicas."""
        for placing in self._placings.values():
            placing.open()
        self._forecasts.open()

    async def aclose(self) -> None:
        """Stop; programs stay where they are."""
        await self._forecasts.aclose()
        for placing in self._placings.values():
            await placing.aclose()
        await self._homes.close()

    def start_s(self) -> Mapping[str, float | None]:
        """By model, seconds within which a turn is expected to start; None: no replica is there."""
        return {model: placing.places.start_s() for model, placing in self._placings.items()}

    def view(self) -> dict[str, Any]:
        """For operators: this ingress's part."""
        models = {model: placing.view() for model, placing in self._placings.items()}
        chosen = {reason.value: n for reason, n in self.classes.counters.items()}
        return {"ingress": self._name, "models": models, "classes": chosen}

    # --- turns --------------------------------------------------------------------------------------------------------

    def answers(
        self, method: str, body: dict[str, Any], headers: dict[str, str], identity: ProgramIdentity
    ) -> WatchedAnswers:
        """A turn of a client: what it is sent, as bytes; where a replica dies, another goes on."""
        return self._of(body).answers(method, kept_apart(body, identity.tenant), headers, identity)

    def plain(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> Calls[bytes | HttpError]:
        """What is no turn: any replica answers."""
        return self._of(body).plain(method, body, headers)

    def turn(
        self, key: str, body: Mapping[str, Any], identity: ProgramIdentity, continuation: Continuation | None
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """The pieces of a turn of a program that runs on the server; see `ReplicaCalls.turn`."""
        return self._of(body).turn(key, kept_apart(body, identity.tenant), identity, continuation)

    def _of(self, body: Mapping[str, Any]) -> ReplicaCalls:
        return self._calls[body.get("model") or self._default]

    # --- the side channel ---------------------------------------------------------------------------------------------

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel wherever the program lives: it may have turns on several models.

        Raises:
            Exception: what Ray or a replica raised.
        """
        if operation == "end":
            self._forecasts.program_ended(key)
            self._traces.program_ended(key)
        for calls in self._calls.values():
            await calls.tell(key, operation, payload)

    async def story(self, key: str) -> dict[str, Any] | None:
        """What the replicas know of a program: of the first model that knows it.

        Raises:
            ControlTimeout: they did not answer.
        """
        for calls in self._calls.values():
            if (story := await calls.story(key)) is not None:
                return story
        return None

    async def to(self, replica: str, method: str, *arguments: Any) -> Any:
        """Call a replica by its id.

        Raises:
            ReplicaGone: it is not there.
            Exception: what else Ray or the replica raised.
        """
        *others, last = self._calls.values()
        for calls in others:
            with suppress(ReplicaGone):
                return await calls.to(replica, method, *arguments)
        return await last.to(replica, method, *arguments)

    async def ready(self) -> None:
        """Returns when a replica of each model has answered; raises what keeps one from doing so."""
        for calls in self._calls.values():
            await calls.ready()

    async def broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """What each replica answers, or the exception that it raised.

        Raises:
            ControlTimeout: not all answered in time.
        """
        return [one for calls in self._calls.values() for one in await calls.broadcast(method, *arguments)]
