"""What an ingress does about forecasts: asks for one of each turn on its way to a replica, and tells what became of it.

A turn never waits longer than the client's deadline, and is served without a forecast if there is none.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

from cluster.answer_usage import usage_of
from cluster.clock import Clock
from cluster.errors import HttpError
from cluster.observing.forecasts import ForecastMetrics
from cluster.placed_calls import prompt_tokens
from cluster.program import Forecasted, ProgramIdentity
from cluster.stream_relay import Relay, ends_stream
from predictor_service.client import ForecastClient
from predictor_service.context import TurnContext
from predictor_service.live_context import shown
from predictor_service.live_history import Arrived, LiveHistory
from predictor_service.observation import Observation, PauseSeen

logger = logging.getLogger("ray.serve")

MAX_PROGRAMS = 20_000
"""Whose turns an ingress remembers."""
SWEEP_S = 1.0
"""Between two looks for programs that have ended; gauges go stale in Ray unless they are set about so often, too."""


class ForeseenTurn(Protocol):
    """A turn on its way."""

    async def identity(self) -> ProgramIdentity:
        """Whose turn it is, with what is expected of it."""
        ...

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """The turn is over; again is nothing. ``output_tokens`` None: it has not come to its proper end."""
        ...


class Unforeseen:
    """A turn of which nothing is forecast."""

    def __init__(self, identity: ProgramIdentity) -> None:
        self._identity = identity

    async def identity(self) -> ProgramIdentity:
        """As its client said."""
        return self._identity

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """Nothing is learnt."""


class NoForecasts:
    """Stands where the configuration wants none."""

    def turn(self, identity: ProgramIdentity, body: Mapping[str, Any]) -> ForeseenTurn:
        """Without a forecast."""
        return Unforeseen(identity)

    def program_ended(self, key: str) -> None:
        """Nothing is learnt."""

    def open(self) -> None:
        """There is nothing to begin."""

    async def aclose(self) -> None:
        """There is nothing to end."""

    def view(self) -> dict[str, Any]:
        """For operators."""
        return {"mode": "none"}


class Forecasts:
    """The forecasts of one ingress process.

    Args:
        client: answers in time.
        clock: measures pauses.
        idle_program_s: a program without a turn for so long has ended.
        default_model: whose programs are told apart by their tenants alone.
        metrics: what is recorded of them.
    """

    def __init__(
        self,
        client: ForecastClient,
        clock: Clock,
        idle_program_s: float,
        default_model: str,
        metrics: ForecastMetrics,
    ) -> None:
        self.history = LiveHistory(MAX_PROGRAMS, idle_program_s)
        self.unread = 0
        """Turns from which nothing could be learnt: a bug of ours."""
        self._client = client
        self._clock = clock
        self._default_model = default_model
        self._metrics = metrics
        self._errors = {"output_tokens": [0, 0.0, 0.0], "pause_s": [0, 0.0, 0.0]}
        """Forecasts that were compared with what came, the sum of their absolute errors, and of what came."""
        self._waited_s = 0.0
        self._foreseen: OrderedDict[str, Forecasted] = OrderedDict()
        """By program, what was expected of its last turn."""
        self._regular: asyncio.Task[None] | None = None

    def turn(self, identity: ProgramIdentity, body: Mapping[str, Any]) -> ForeseenTurn:
        """A turn has come. Its forecast is asked for when its identity is."""
        model = body.get("model")
        source = identity.tenant
        if isinstance(model, str) and model != self._default_model:
            source = f"{source}@{model}"
        try:
            return LiveTurn(self, identity, body, source)
        except Exception:  # a bug of ours, or a body that nobody thought of: the turn is served all the same
            logger.exception("a turn could not be read for its forecast")
            self.unread += 1
            return Unforeseen(identity)

    def program_ended(self, key: str) -> None:
        """Somebody says so."""
        self.learn(self.history.program_ended(key))

    def open(self) -> None:
        """Begin to share what is learnt."""
        self._client.open()
        self._regular = asyncio.create_task(self._sweep_for_ever())

    async def aclose(self) -> None:
        """Stop, and write what was learnt."""
        if self._regular is not None:
            self._regular.cancel()
        await self._client.aclose()

    def view(self) -> dict[str, Any]:
        """For operators: who answered, and how far off the forecasts were."""
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

    async def forecast(self, context: TurnContext) -> Forecasted | None:
        """Ask the client."""
        began_s = self._clock.now_s()
        forecast = await self._client.forecast(context)
        waited_s = self._clock.now_s() - began_s
        self._waited_s += waited_s
        self._metrics.asked(waited_s)
        return forecast

    def arrived(self, turn: Arrived, *, lone: bool) -> TurnContext:
        """A turn has come; what it shows of the one before it is learnt."""
        if lone:
            return self.history.lone(turn)
        context, news = self.history.arrived(turn, self._clock.now_s())
        foreseen = self._foreseen.pop(turn.key, None)
        for seen in news:
            if foreseen is not None and isinstance(seen, PauseSeen) and seen.pause.turn.source == turn.source:
                self._compare_pause(foreseen, seen)
        self.learn(news)
        return context

    def ended(
        self,
        turn: Arrived,
        context: TurnContext,
        forecast: Forecasted | None,
        *,
        output_tokens: int | None,
        prompt_tokens: int | None,
    ) -> None:
        """A turn is over."""
        now_s = self._clock.now_s()
        if forecast is not None and output_tokens is not None:
            self._compared("output_tokens", forecast.output_tokens, output_tokens)
            self._foreseen[turn.key] = forecast
            if len(self._foreseen) > MAX_PROGRAMS:
                self._foreseen.popitem(last=False)
        self.learn(self.history.ended(turn, context, now_s, output_tokens=output_tokens, prompt_tokens=prompt_tokens))

    def learn(self, news: list[Observation]) -> None:
        """Something was seen of turns."""
        if news:
            self._client.observe(news)

    def _compare_pause(self, foreseen: Forecasted, seen: PauseSeen) -> None:
        if seen.outcome.duration_s is not None:
            of_tool = foreseen.tool(seen.pause.tool)
            expected_s = foreseen.pause_s if of_tool is None else of_tool.pause_s
            self._compared("pause_s", expected_s, seen.outcome.duration_s)

    def _compared(self, what: str, forecast: float, actual: float) -> None:
        counted = self._errors[what]
        counted[0] += 1
        counted[1] += abs(forecast - actual)
        counted[2] += actual

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.learn(self.history.sweep(self._clock.now_s()))
            self._metrics.record(self._client.counters, self._errors)


class LiveTurn:
    """A turn on its way: see `ForeseenTurn`."""

    def __init__(self, forecasts: Forecasts, identity: ProgramIdentity, body: Mapping[str, Any], source: str) -> None:
        self._forecasts = forecasts
        self._identity = identity
        hints = identity.hints
        lone = identity.key is None
        self._arrived = Arrived(
            key=identity.key or "",
            shown=shown(body),
            source=source,
            prompt_tokens=prompt_tokens(body),
            last=identity.last_turn,
            last_tool=hints.last_tool,
            expected_tool=hints.expected_tool,
        )
        self._learns = not lone and body.get("n") in (None, 1)
        self._context = forecasts.arrived(self._arrived, lone=lone)
        self._forecast: Forecasted | None = None
        self._over = False

    async def identity(self) -> ProgramIdentity:
        """Whose turn it is, with what is expected of it."""
        self._forecast = await self._forecasts.forecast(self._context)
        return replace(self._identity, forecast=self._forecast)

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """The turn is over; again is nothing."""
        if self._over:
            return
        self._over = True
        try:
            self._end(output_tokens, prompt_tokens)
        except Exception:  # as above
            logger.exception("what became of a turn was not learnt")
            self._forecasts.unread += 1

    def _end(self, output_tokens: int | None, prompt_tokens: int | None) -> None:
        self._forecasts.ended(
            self._arrived,
            self._context,
            self._forecast,
            output_tokens=output_tokens if self._learns else None,
            prompt_tokens=prompt_tokens,
        )


class WatchedAnswers:
    """A turn's answer on its way to a client; at its end the turn is told what became of it.

    Args:
        relay: the answer.
        turn: whose.
    """

    def __init__(self, relay: Relay[bytes], turn: ForeseenTurn) -> None:
        self._relay = relay
        self._turn = turn
        self._last = b""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        piece = await anext(self._relay)
        if isinstance(piece, HttpError):
            self._last = b""
        else:
            self._last = piece
            if piece.startswith(b"{") or ends_stream(piece):
                self._tell()
        return piece

    @property
    def output_tokens(self) -> int:
        """Of a stream, that have come."""
        return self._relay.output_tokens

    def cancel(self) -> None:
        """The answer is over, or nobody wants it any more."""
        self._relay.cancel()
        self._turn.over(output_tokens=None)

    def _tell(self) -> None:
        if self._last.startswith(b"{"):
            used = usage_of(self._last)
            self._turn.over(output_tokens=used.completion, prompt_tokens=used.prompt)
        else:
            self._turn.over(output_tokens=self._relay.output_tokens)
