"""An ingress's predictions. It requests one for each turn that is sent to a replica, and records the turn's outcome.

A turn never waits longer than the client's deadline, and is served without a prediction if there is none.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Protocol, Self

from ray.serve.handle import DeploymentHandle

from cluster.api.openai import contains_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import HttpError
from cluster.core.program import Prediction, ProgramIdentity
from cluster.core.supervision import SupervisedTasks
from cluster.core.turn_tokens import TurnTokens
from cluster.dispatch.failover import FailoverStream, ends_answer
from cluster.observing.meter import Meter
from cluster.observing.recorders import PredictionMetrics
from predictor_service.client import PredictionClient, prediction_client
from predictor_service.live_context import shown
from predictor_service.live_history import Arrived, LiveHistory
from predictor_service.model import Observation, PauseSeen, TurnContext
from predictor_service.service import ServiceHandle

logger = logging.getLogger("ray.serve")

MAX_PROGRAMS = 20_000
"""Largest number of programs whose turns an ingress remembers."""
SWEEP_S = 1.0
"""Seconds between two sweeps for programs that have ended. The gauges are set as often, because Ray drops older ones.
"""


class PredictedTurn(Protocol):
    """A turn that is sent to a replica."""

    async def identity(self) -> ProgramIdentity:
        """Return the identity of the turn's program, with the prediction."""
        ...

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None, refused: bool = False) -> None:
        """Record the end of the turn. A second call does nothing.

        ``output_tokens`` is None if the turn failed or was cancelled. ``refused``: its request was invalid, so that it
        never began.
        """
        ...


def is_refusal(piece: object) -> bool:
    """Return whether a piece of an answer says that the turn's request was invalid, so that it never began."""
    return isinstance(piece, HttpError) and piece.status == HTTPStatus.BAD_REQUEST


class NullPrediction:
    """A turn for which there is no prediction."""

    def __init__(self, identity: ProgramIdentity) -> None:
        self._identity = identity

    async def identity(self) -> ProgramIdentity:
        """Return the identity as the client sent it."""
        return self._identity

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None, refused: bool = False) -> None:
        """Ignore the end of the turn, since nothing was predicted."""


class NullPredictions:
    """Replaces `Predictions` where the configuration has no predictor."""

    failed: tuple[str, ...] = ()
    """Names of failing background loops: there are none."""

    def turn(self, identity: ProgramIdentity, body: Mapping[str, Any], tokens: int) -> PredictedTurn:
        """Return the turn without a prediction."""
        return NullPrediction(identity)

    def program_ended(self, key: str) -> None:
        """Ignore the end of the program, since nothing is learnt."""

    def open(self) -> None:
        """Do nothing: there are no background loops."""

    async def aclose(self) -> None:
        """Do nothing: there is no predictor to stop."""

    def view(self) -> dict[str, Any]:
        """Return the state for operators."""
        return {"mode": "none"}


class Predictions:
    """The predictions of one ingress process.

    Args:
        client: answers within its deadline.
        clock: measures pauses.
        program_ttl_s: seconds without a turn after which a program has ended.
        default_model: the model that is not part of the name of its programs' source.
        metrics: records predictions.
        alone: whether this is the only ingress process.
    """

    def __init__(
        self,
        client: PredictionClient,
        clock: Clock,
        program_ttl_s: float,
        default_model: str,
        metrics: PredictionMetrics,
        *,
        alone: bool = True,
    ) -> None:
        self.history = LiveHistory(MAX_PROGRAMS, program_ttl_s, alone=alone)
        self.unread = 0
        """Number of turns from which nothing was learnt because of a bug."""
        self._client = client
        self._clock = clock
        self._default_model = default_model
        self._metrics = metrics
        self._errors = {"output_tokens": [0, 0.0, 0.0], "pause_s": [0, 0.0, 0.0]}
        """By quantity: the number of compared predictions, the sum of their absolute errors, and the sum of the
        outcomes."""
        self._waited_s = 0.0
        self._last: OrderedDict[str, Prediction] = OrderedDict()
        """The prediction of the last turn, by program."""
        self._tasks = SupervisedTasks("predictions", clock)

    @property
    def healthy(self) -> bool:
        """Whether no background task keeps failing."""
        return self._tasks.healthy and self._client.healthy

    def turn(self, identity: ProgramIdentity, body: Mapping[str, Any], tokens: int) -> PredictedTurn:
        """Record the arrival of a turn. Its prediction is requested together with its identity.

        ``tokens``: the number of prompt tokens.
        """
        model = body.get("model")
        source = identity.tenant
        if isinstance(model, str) and model != self._default_model:
            source = f"{source}@{model}"
        try:
            return LiveTurn(self, identity, body, source, tokens)
        except Exception:  # a bug, or an unexpected body: the turn is served nevertheless
            logger.exception("a turn could not be read for its prediction")
            self.unread += 1
            return NullPrediction(identity)

    def program_ended(self, key: str) -> None:
        """Record that a client or a run has ended the program."""
        self.learn(self.history.program_ended(key))

    def open(self) -> None:
        """Start the background tasks."""
        self._client.open()
        self._tasks.start("sweep", self._sweep_for_ever)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._tasks.failed

    async def aclose(self) -> None:
        """Stop, and write what was learnt."""
        await self._tasks.aclose()
        await self._client.aclose()

    def view(self) -> dict[str, Any]:
        """Return for operators who answered, and how large the errors of the predictions were."""
        return {
            "answered": {kind.value: n for kind, n in self._client.counters.items()},
            "mean_absolute_error": {name: total / n if n else None for name, (n, total, _) in self._errors.items()},
            "compared": {name: n for name, (n, _, _) in self._errors.items()},
            "waited_s": self._waited_s,
            "unread": self.unread,
            "programs": len(self.history),
            **self._client.view(),
        }

    # --- called by a LiveTurn -----------------------------------------------------------------------------------------

    async def predict(self, context: TurnContext) -> Prediction | None:
        """Return the client's prediction for a turn, or None, and record the wait."""
        began_s = self._clock.now_s()
        prediction = await self._client.predict(context)
        waited_s = self._clock.now_s() - began_s
        self._waited_s += waited_s
        self._metrics.waited(waited_s)
        return prediction

    def arrived(self, turn: Arrived, *, single: bool) -> TurnContext:
        """Record the arrival of a turn, and learn what it shows of the turn before.

        ``single``: it belongs to no program.
        """
        if single:
            return self.history.single(turn)
        context, news = self.history.arrived(turn, self._clock.now_s())
        predicted = self._last.pop(turn.key, None)
        for seen in news:
            if predicted is not None and isinstance(seen, PauseSeen) and seen.pause.turn.source == turn.source:
                self._compare_pause(predicted, seen)
        self.learn(news)
        return context

    def ended(
        self,
        turn: Arrived,
        context: TurnContext,
        prediction: Prediction | None,
        *,
        output_tokens: int | None,
        prompt_tokens: int | None,
        refused: bool,
    ) -> None:
        """Record the end of a turn."""
        now_s = self._clock.now_s()
        if prediction is not None and output_tokens is not None:
            self._compared("output_tokens", prediction.output_tokens, output_tokens)
            self._last[turn.key] = prediction
            if len(self._last) > MAX_PROGRAMS:
                self._last.popitem(last=False)
        self.learn(
            self.history.ended(
                turn, context, now_s, output_tokens=output_tokens, prompt_tokens=prompt_tokens, refused=refused
            )
        )

    def learn(self, news: list[Observation]) -> None:
        """Pass observations of turns to the client."""
        if news:
            self._client.observe(news)

    def _compare_pause(self, predicted: Prediction, seen: PauseSeen) -> None:
        if seen.outcome.duration_s is not None:
            of_tool = predicted.tool(seen.pause.tool)
            expected_s = predicted.pause_s if of_tool is None else of_tool.pause_s
            self._compared("pause_s", expected_s, seen.outcome.duration_s)

    def _compared(self, quantity: str, predicted: float, actual: float) -> None:
        counted = self._errors[quantity]
        counted[0] += 1
        counted[1] += abs(predicted - actual)
        counted[2] += actual

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for news in self.history.sweep(self._clock.now_s()):
                self.learn(news)
                await asyncio.sleep(0)  # a program takes milliseconds to learn, and many may end in one second
            self._metrics.record(self._client.counters, self._errors)


class LiveTurn:
    """A turn that is sent to a replica: see `PredictedTurn`."""

    def __init__(
        self, predictions: Predictions, identity: ProgramIdentity, body: Mapping[str, Any], source: str, tokens: int
    ) -> None:
        self._predictions = predictions
        self._identity = identity
        hints = identity.hints
        single = identity.key is None
        self._arrived = Arrived(
            key=identity.key or "",
            shown=shown(body),
            source=source,
            prompt_tokens=tokens,
            last=identity.last_turn,
            last_tool=hints.last_tool,
            expected_tool=hints.expected_tool,
        )
        self._learns = not single and body.get("n") in (None, 1)
        self._context = predictions.arrived(self._arrived, single=single)
        self._prediction: Prediction | None = None
        self._over = False

    async def identity(self) -> ProgramIdentity:
        """Return the identity of the turn's program, with the prediction."""
        self._prediction = await self._predictions.predict(self._context)
        return replace(self._identity, forecast=self._prediction)

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None, refused: bool = False) -> None:
        """Record the end of the turn. A second call does nothing."""
        if self._over:
            return
        self._over = True
        try:
            self._predictions.ended(
                self._arrived,
                self._context,
                self._prediction,
                output_tokens=output_tokens if self._learns else None,
                prompt_tokens=prompt_tokens,
                refused=refused,
            )
        except Exception:  # a bug of ours costs what could have been learnt, and no turn
            logger.exception("nothing was learnt from a turn")
            self._predictions.unread += 1


class WatchedAnswers:
    """A turn's answer for a client. Its end is recorded with the turn.

    Args:
        relay: the answer.
        turn: the turn that is answered.
    """

    def __init__(self, relay: FailoverStream[bytes], turn: PredictedTurn) -> None:
        self._relay = relay
        self._turn = turn

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        piece = await anext(self._relay)
        if is_refusal(piece):
            self._turn.over(output_tokens=None, refused=True)
        elif not isinstance(piece, HttpError) and ends_answer(piece):
            # A turn without a token shows nothing.
            output_tokens = None if contains_error(piece) else self._relay.output_tokens or None
            self._turn.over(output_tokens=output_tokens, prompt_tokens=self._relay.prompt_tokens)
        return piece

    @property
    def output_tokens(self) -> int:
        """Number of tokens that have come."""
        return self._relay.output_tokens

    @property
    def alone_s(self) -> float | None:
        """See `cluster.core.slo.TurnRecord.alone_s`."""
        return self._relay.alone_s

    @property
    def record(self) -> TurnTokens | None:
        """The tokens of the whole turn, at its end, if they are recorded."""
        return self._relay.record

    def cancel(self) -> None:
        """Stop the answer. It is complete, or nobody wants it any more."""
        self._relay.cancel()
        self._turn.over(output_tokens=None)


def predictions(
    config: CaesuraConfig, clock: Clock, name: str, predictor: DeploymentHandle | None
) -> Predictions | NullPredictions:
    """Return the predictions for the configuration.

    Args:
        config: the whole configuration.
        clock: measures pauses and waits.
        name: the name of this ingress process.
        predictor: the predictor service, or None if there is none.

    Raises:
        ConfigError: the store's URL cannot be used.
    """
    client = prediction_client(config, clock, name, None if predictor is None else ServiceHandle(predictor))
    if client is None:
        return NullPredictions()
    metrics = PredictionMetrics(Meter(enabled=config.metrics.enabled), config.predictor.mode)
    alone = config.http.ingress_replicas == 1
    return Predictions(client, clock, config.limits.program_ttl_s, config.model.id, metrics, alone=alone)
