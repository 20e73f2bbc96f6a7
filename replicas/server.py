"""ProgramServer: one replica of the model, as a Ray Serve deployment. It connects vLLM and the side channel.

It overrides these methods of `ray.llm`'s LLMServer, Ray 2.60.0 (tests/contracts/test_ray_contracts.py checks the
names):
    __init__, start, check_health, record_routing_stats   our loops and the server of turns beside the engine
    record_autoscaling_stats                              what the autoscaler reads (Ray's hook, LLMServer has none)
    __del__                                               waits for the open turns, which Ray does not see
    _start_engine                                         no telemetry actor
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from time import time
from typing import Any, NoReturn

import msgspec
import psutil
import ray
from msgspec.structs import replace
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    ErrorResponse,
)
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.api.generate import named_as_sent
from cluster.api.openai import REQUEST_ID
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import ControlTimeout, EngineGone, HttpError, ReplicaLost
from cluster.core.frames import TURN, Answer, TurnCall
from cluster.core.malloc_trim import freeze_heap, keep_trimmed
from cluster.core.program import tenant_of
from cluster.core.replica_snapshot import ROUTING_STATS_KEY
from cluster.core.stream import Progress, StreamChunk
from cluster.core.turn import Continuation, TurnPiece
from cluster.core.turn_address import TurnAddress
from cluster.core.usage import DayUsage
from cluster.observing.logs import bind
from cluster.observing.logs import configure as configure_logs
from cluster.observing.meter import Meter
from cluster.observing.recorders import Fallback, ReplicaMetrics, ReplicaState
from cluster.observing.tracing import traces
from cluster.store.client import StoreUnavailable
from cluster.store.durations import DurationStore
from cluster.store.usage import UsageStore
from cluster.store.weights import WeightsStore, WeightsTarget
from replicas.chat_text import ChatText
from replicas.coalescing import Ticks, coalesce
from replicas.control import ControlChannel
from replicas.duration_sync import DurationSync
from replicas.early_prompt import EarlyPrompts
from replicas.engine import ReplicaEngine
from replicas.finish_reasons import correct_answer
from replicas.leaving import USAGE_S, begin_leaving, until_written, written
from replicas.program_turn import ProgramTurns
from replicas.render_threads import reading, reading_ahead
from replicas.requests import (
    as_refusal,
    attach_program,
    naming_field,
    of_first_event,
    of_response,
    parse_request,
)
from replicas.resumption import Watch, events
from replicas.rewritten_ahead import RewrittenAhead
from replicas.router_side import RouterSide
from replicas.streamed_logprobs import request_every_token, without_ids
from replicas.turn_server import TurnServer
from replicas.vllm_versions import GeneratedTokens
from replicas.weights import ReplicaWeights

logger = logging.getLogger("ray.serve")

LAST_WORDS_S = 0.3
"""Seconds from the engine's death to the replica's end. Its streams are ended in this time."""

ENGINE_GONE_STATUS = 1
"""Exit status of a replica whose engine is dead."""


class ProgramServer(LLMServer):
    """A vLLM engine, the channel to its scheduler, and the loop that exchanges tool statistics with the store.

    A replica whose engine is dead ends its process at once. Ray replaces it, and no request is sent to it until then.
    """

    async def __init__(self, llm_config: LLMConfig, *, config: CaesuraConfig) -> None:  # type: ignore[misc]
        configure_logs(config.logs, "replica")
        self._config = config
        self._durations = DurationSync()
        self._observed = self._noted = self._billed = 0
        self._store_due_s = 0.0
        self._router_side: RouterSide | None = None
        source, start_s = str(llm_config.model_loading_config.model_source), config.replicas.start_timeout_s
        replicas = config.replicas
        kv_store = replicas.kv_store.name if replicas.kv_store is not None else None
        self._weights = ReplicaWeights(source, start_s, self._end_soon, kv_store)
        self._loops: list[asyncio.Task[NoReturn]] = []
        self._ticks = Ticks(replicas.stream_interval_ms / 1000)
        max_waiting = None if replicas.max_queued_requests < 0 else replicas.max_queued_requests
        self._turn_server = TurnServer(self._answer, max_turns=replicas.max_ongoing_requests, max_waiting=max_waiting)
        await super().__init__(llm_config, engine_cls=ReplicaEngine)

    async def start(self) -> None:
        """Load the model, then begin the exchange loop.

        Raises:
            TimeoutError: the engine did not start within ``replicas.start_timeout_s``.
        """
        model, store = self._config.model, self._config.redis
        meter = Meter({"model": model.id}, enabled=self._config.metrics.enabled)
        self._metrics = ReplicaMetrics(meter, self._config.tenants)
        await asyncio.wait_for(super().start(), self._config.replicas.start_timeout_s)
        self._channel = ControlChannel(self.engine.client, self._config.limits.timeout_s)
        self._router_side = RouterSide(self._channel, self.replica_id, model.id, self._metrics.fell_back)
        self._store = DurationStore(
            store.url,
            model=model.id,
            writer=self.replica_id,
            timeout_s=store.timeout_s,
            expiry_s=store.expiry_s,
            clock=MonotonicClock(),
        )
        self._usage = UsageStore(store.url, timeout_s=store.timeout_s, clock=MonotonicClock())
        self._weights_store = WeightsStore(store.url, model=model.id, timeout_s=store.timeout_s, clock=MonotonicClock())
        kv_store = self._config.replicas.kv_store
        may_see = kv_store is None or not kv_store.knows_only_tokens
        self._text = ChatText(self.engine.chat_renderer, may_see=may_see)
        self._turns = ProgramTurns(self.engine, self._text, self._ticks, self._metrics.rendered)
        await self._turns.examine()
        extend = partial(self._channel.call, "extend")
        self._early_prompts = EarlyPrompts(self._text, self._turns.examined, extend)
        wanted = self._config.replicas.rewrite_ahead
        may_reason = self.engine.may_reason
        self._ahead = RewrittenAhead(self._text, self._turns.examined, extend, enabled=wanted, may_reason=may_reason)
        await self._warm_up()
        self._weights.open(self.engine, self._channel.call, self.engine.streams)
        await self._weights.catch_up(self._weights_store)
        await self._turn_server.start(ray.util.get_node_ip_address())
        self._of_router.start_s = time() - psutil.Process().create_time()
        self._metrics.started()
        keep_trimmed()
        freeze_heap()
        self._traces = traces(self._config, "replica")
        loops = (self._exchange_for_ever(), self.engine.log_for_ever(), self._follow_weights_for_ever())
        self._loops = [asyncio.create_task(loop) for loop in loops]

    async def __del__(self) -> None:
        """Wait until no turn is open, and their usage and, if there is a disk tier, the programs' contexts are written.

        Ray Serve calls it before it ends this process, and ends its wait after ``graceful_shutdown_timeout_s``.
        """
        keeps = hasattr(self, "_channel") and self._config.replicas.disk_tier is not None
        if keeps:
            await begin_leaving(self._channel.call)
        if hasattr(self, "_turn_server"):
            await self._turn_server.aclose()
        if getattr(self, "_loops", None):
            await until_written(self._usage_is_written, "the usage of its last turns is written", USAGE_S)
        if keeps:
            await written(self._channel.call)
        await super().__del__()

    async def _start_engine(self) -> None:
        await self.engine.start()

    async def _warm_up(self) -> None:
        """Generate one token before the first client comes, because vLLM's imports and compilation then take seconds.

        Raises:
            HttpError: this model cannot generate.
        """
        body = {"prompt": [0], "max_tokens": 1}
        async for piece in self.answer("completions", body, {}, None, None):
            if isinstance(piece, HttpError):
                raise piece

    @property
    def _of_router(self) -> RouterSide:
        assert self._router_side is not None, "the replica has not started"
        return self._router_side

    @property
    def replica_id(self) -> str:
        """Ray Serve's id of this replica, unique in the application."""
        return str(serve.get_replica_context().replica_id.unique_id)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def answer(
        self,
        method: str,
        body: dict[str, Any],
        headers: dict[str, str],
        key: str | None,
        identity: str | None,
        epoch: int | None = None,
        so_far: Progress | None = None,
        *,
        record: bool = False,
    ) -> AsyncGenerator[bytes | StreamChunk[bytes] | HttpError]:
        """Serve one request of the ingress. Yield what the client gets, or as the last piece the error.

        A stream's pieces report the stream's progress.

        Args:
            method: ``chat``, ``completions``, ``generate``, ``tokenize`` or ``detokenize``.
            body: the JSON body, without the fields of the program's identity.
            headers: headers that vLLM may see. ``x-request-id`` becomes part of the answer's id.
            key: the program's key. None: the request belongs to no program.
            identity: the encoded ProgramIdentity. None for a request that is not a turn.
            epoch: epoch of the program's placement. A turn of an earlier epoch is rejected as ProgramMoved. None: it is
                never rejected.
            so_far: progress of this stream on another replica. None: it begins here.
            record: whether the last piece's progress has the tokens of the whole turn.
        """
        watch = Watch(so_far, record=record, version=self._weights.version)
        bind(program=key, request=headers.get(REQUEST_ID))
        try:
            self._of_router.receive(method, body, key, epoch)
            reading(tenant_of(key or ""), body)
            self._text.check_parts(body, required=method == "chat")
            request = parse_request(method, self._text.legible(body) if method == "tokenize" else body)
            if "messages" in body and method in ("chat", "tokenize"):
                self._text.make_plain(request)
            attach_program(request, headers, key, identity)
            has_ids = request_every_token(request)
            seen = self._ahead.watch(method, key, resumed=so_far is not None)
            answers = getattr(self.engine, method)(request, RawRequestInfo(headers=headers))
            with self.engine.streams.watching(request, watch):
                if getattr(request, "stream", False):
                    answers = without_ids(answers) if has_ids else answers
                    answers = coalesce(events(answers, watch), self._ticks)
                async with aclosing(answers):
                    async for piece in _as_sent(answers, watch):
                        if seen is not None and not isinstance(piece, HttpError):
                            seen.feed(piece.data if isinstance(piece, StreamChunk) else piece)
                        yield _named(piece, method, body) if isinstance(piece, HttpError) else piece
            if seen is not None and key is not None:
                self._ahead.turn_ended(key, body, seen)
        except Exception as error:  # noqa: BLE001 - the boundary: vLLM's exceptions do not leave the replica
            yield self._refused(error, method, body, watch)

    async def turn(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        key: str | None,
        identity: str | None,
        continuation: Continuation | None,
        epoch: int | None = None,
        so_far: Progress | None = None,
        answers: Sequence[int] | None = None,
        *,
        record: bool = False,
    ) -> AsyncGenerator[StreamChunk[tuple[TurnPiece, ...]] | HttpError]:
        """Serve one turn of a program that the cluster runs; see `replicas.program_turn.ProgramTurns.run`.

        ``epoch``, ``so_far`` and ``record`` are as for :meth:`answer`.
        """
        watch = Watch(so_far, record=record, version=self._weights.version)
        bind(program=key, request=headers.get(REQUEST_ID))
        try:
            self._of_router.receive("chat", body, key, epoch)
            reading(tenant_of(key or ""), body)
            run = self._turns.run(body, headers, key, identity, continuation, watch, answers)
            async with aclosing(run) as batches:
                async for batch in batches:
                    yield batch
        except Exception as error:  # noqa: BLE001 - the boundary: vLLM's exceptions do not leave the replica
            yield self._refused(error, "turn", body, watch)

    def _answer(self, call: TurnCall) -> AsyncGenerator[Answer]:
        """Serve one call of the turn server."""
        whose, resumed = (call.key, call.identity), (call.epoch, call.so_far)
        if call.method == TURN:
            arguments = (call.body, call.headers, *whose, call.continuation, *resumed, call.answers)
            return self.turn(*arguments, record=call.record)
        return self.answer(call.method, call.body, call.headers, *whose, *resumed, record=call.record)

    def _refused(self, error: Exception, method: str, body: Mapping[str, Any], watch: Watch) -> HttpError:
        """Return the error for the caller. If the engine is dead, this replica ends soon too."""
        refusal = as_refusal(error)
        if isinstance(refusal, ReplicaLost):
            refusal.at_work = watch.name is not None
            refusal.culprit = self.engine.broken_by(watch.name)
            self._end_soon()
        elif refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.exception("%s failed", method)
        return _named(refusal, method, body)

    # --- called by the ingress, by name -------------------------------------------------------------------------------

    async def turn_address(self) -> TurnAddress:
        """Return the address of this replica's turn server."""
        return self._turn_server.address

    async def slot(self, body: dict[str, Any]) -> AsyncGenerator[TurnAddress]:
        """Yield the address of this replica's turn server, and occupy one of its requests until the call is cancelled.

        With it, one of Ray's own routers places a turn and knows the load of each replica.

        Args:
            body: the body of the turn, by which some routers choose.
        """
        yield self._turn_server.address
        await asyncio.sleep(self._config.http.request_timeout_s)

    async def plain(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | HttpError:
        """Serve one request that is not a turn (``tokenize``, ``detokenize``); see :meth:`answer`."""
        async with aclosing(self.answer(method, body, headers, None, None)) as answers:
            answer = await anext(answers)
        assert not isinstance(answer, StreamChunk)
        return answer

    async def max_model_len(self) -> int:
        """Return the model's context window in tokens."""
        return int(self.engine.client.vllm_config.model_config.max_model_len)

    async def ready(self) -> bool:
        """Return True once the engine's own loop has answered.

        Raises:
            ControlError: the loop did not answer, or the engine is dead.
        """
        await self._channel.call("policy")
        return True

    async def program_story(self, key: str) -> dict[str, Any]:
        """Return what this replica knows of a program. It is empty if it does not know the program."""
        return await self._channel.call("program", key=key)

    async def control(self, operation: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run one operation of the side channel; see ``replicas.control.OPERATIONS``."""
        return {"replica": self.replica_id, **await self._channel.call(operation, **payload)}

    async def extend(
        self, key: str, body: dict[str, Any], continuation: Continuation | None
    ) -> tuple[str | None, HttpError | None]:
        """Compute a paused program's next prompt as far as it is known; see `replicas.early_prompt.EarlyPrompts.send`.

        Returns:
            Why nothing more is computed in this pause, or None; and the error if the body cannot be read.
        """
        try:
            reading(tenant_of(key), body)
            reading_ahead()
            return await self._early_prompts.send(key, body, continuation), None
        except Exception as error:  # noqa: BLE001 - the boundary: vLLM's exceptions do not leave the replica
            return None, naming_field(as_refusal(error), body)

    async def moved_away(self, key: str, epoch: int) -> dict[str, Any]:
        """End a program here whose home is another replica; see `replicas.router_side.RouterSide.moved_away`."""
        return {"replica": self.replica_id, **await self._of_router.moved_away(key, epoch)}

    async def demand(self, ingress: str, demand: dict[str, float]) -> None:
        """Take the demand that an ingress sees; see `replicas.router_side.RouterSide.receive_demand`."""
        self._of_router.receive_demand(ingress, demand)

    async def drain(self, on: bool) -> dict[str, Any]:
        """Set whether programs leave this replica at their pauses. The router sees it within about a second."""
        self._of_router.draining = on
        return {"replica": self.replica_id, "draining": on}

    async def set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Switch the scheduler's policy from the next step on. The programs stay, and their holds end."""
        return await self.control("set_policy", policy)

    async def reset_caches(self) -> dict[str, Any]:
        """End all holds and empty the prefix cache and the host tier.

        ``reset`` is False while turns, copies or the disk use them. Then nothing has changed.
        """
        return await self.control("reset", {})

    async def weights(self) -> dict[str, Any]:
        """Return the version of this replica's weights, their folder, and whether it is paused."""
        return {"replica": self.replica_id, **self._weights.view()}

    async def check_weights(self, path: str) -> HttpError | None:
        """Return why a folder of weights cannot be loaded here, or None."""
        try:
            await asyncio.to_thread(self._weights.check, path)
        except HttpError as error:
            return error
        return None

    async def follow_weights(self, target: WeightsTarget) -> dict[str, Any] | HttpError:
        """Load weights, pause or resume; see `replicas.weights.ReplicaWeights.follow`. Return the error if it fails."""
        try:
            await self._weights.follow(target)
        except HttpError as error:
            error.message = f"replica {self.replica_id}: {error.message}"
            return error
        return await self.weights()

    async def snapshot(self) -> dict[str, Any]:
        """Return the scheduler's numbers now, and whether prompts of programs can be extended exactly."""
        answer = await self._channel.call("exchange")
        own = {
            "template_prefix_stable": self._turns.template_prefix_stable,
            "draining": self._of_router.draining,
            "start_s": self._of_router.start_s,
        }
        return {"replica": self.replica_id, "pid": os.getpid(), **own, **answer["snapshot"]}

    # --- Ray Serve's hooks --------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise if one of the loops has ended. End the process soon if the engine is dead."""
        for loop in self._loops:
            if loop.done():
                await loop
        self._end_if_engine_gone()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return Ray's routing stats with a packed `ReplicaSnapshot`.

        Ray calls it about once a second, for every router.
        """
        stats = await super().record_routing_stats()
        packed = await self._router_side.publish() if self._router_side is not None else None
        return stats if packed is None else {**stats, ROUTING_STATS_KEY: packed}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return `cluster.core.scaling_report.ReplicaReport.numbers`. Ray calls it about once a second if the number of
        replicas follows the load.
        """
        return {} if self._router_side is None else self._router_side.scaling_report()

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _exchange_for_ever(self) -> NoReturn:
        while True:
            self._end_if_engine_gone()
            await self._exchange()
            await asyncio.sleep(self._config.redis.refresh_s)

    async def _follow_weights_for_ever(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._config.redis.refresh_s)
            try:
                await self._weights.follow_store(self._weights_store)
            except HttpError as error:  # if the weights are not whole any more, this process ends
                logger.error("the weights of the store are not loaded: %s", error.message)
            except (EngineDeadError, EngineGone):
                self._end_soon()

    async def _exchange(self) -> None:
        try:
            taken = {
                "observed": self._observed,
                "noted": self._noted,
                "billed": self._billed,
                **self._durations.payload(),
            }
            answer = await self._channel.call("exchange", **taken)
        except EngineGone:
            self._end_soon()
            return
        except ControlTimeout:
            self._metrics.fell_back(Fallback.CONTROL_TIMEOUT)
            logger.warning("the scheduler did not answer within %s s", self._config.limits.timeout_s)
            return
        self._observed, self._noted = answer["observations"]["number"], answer["traced"]["number"]
        self._traces.replay(answer["traced"]["notes"], self._config.model.id, MonotonicClock())
        self._early_prompts.add_to(answer["snapshot"])
        self._metrics.record(answer["snapshot"])
        self._metrics.observe(answer["observations"])
        self._metrics.record_state(ReplicaState.DRAINING if self._of_router.draining else ReplicaState.UP)
        self._durations.answered(answer["revision"], answer["durations"])
        await self._exchange_durations()
        await self._write_usage(answer["bills"]["revision"], answer["bills"]["packed"])
        self._metrics.record_store(self._store.failures, up=self._store.healthy)

    async def _write_usage(self, revision: int, packed: bytes) -> None:
        """Write the usage of programs. What is not written is sent by the scheduler again."""
        try:
            rows = msgspec.msgpack.decode(packed, type=list[DayUsage])
            await self._usage.write(self._config.model.id, self.replica_id, rows)
        except StoreUnavailable:
            self._metrics.fell_back(Fallback.STORE_UNREACHABLE)
        else:
            self._billed = revision

    async def _usage_is_written(self) -> bool:
        """Write some of the usage that is not written yet. Return whether there was none."""
        before = self._billed
        bills = (await self._channel.call("exchange", billed=before))["bills"]
        await self._write_usage(bills["revision"], bills["packed"])
        return bool(bills["revision"] == before)

    async def _exchange_durations(self) -> None:
        """Exchange tool statistics with the store, unless there are so many replicas that it is not yet time."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._store_due_s:
            return
        others = await self._store.exchange(self._durations.own)
        period_s = self._config.redis.refresh_s
        self._store_due_s = now_s + self._store.pause_s(period_s) - period_s / 2
        if others is None:
            self._metrics.fell_back(Fallback.STORE_UNREACHABLE)
        else:
            self._durations.set_others(others)

    def _end_if_engine_gone(self) -> None:
        if self.engine is not None and self.engine.client is not None and self.engine.client.errored:
            self._end_soon()

    def _end_soon(self) -> None:
        """End the process after LAST_WORDS_S. Every request in flight has to be answered before."""
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._end)

    def _end(self) -> NoReturn:
        logger.critical("this replica ends so that Ray replaces it, as its engine is dead or has not the right weights")
        logging.shutdown()
        os._exit(ENGINE_GONE_STATUS)


async def _as_sent(
    answers: AsyncGenerator[Any], watch: Watch
) -> AsyncGenerator[bytes | StreamChunk[bytes] | HttpError]:
    """Yield pieces of a stream, or the one answer, as they are sent to the client. vLLM's errors become ours."""
    first = True
    async for piece in answers:
        match piece:
            case StreamChunk():
                yield (of_first_event(piece.data) if first else None) or piece
            case HttpError():
                yield piece
            case ErrorResponse():
                yield of_response(piece)
            case ChatCompletionResponse():
                correct_answer(piece, watch.endings)
                yield _whole(piece, watch)
            case CompletionResponse() | GeneratedTokens():
                yield _whole(piece, watch)
            case _:
                yield piece.model_dump_json().encode()
        first = False


def _whole(answer: Any, watch: Watch) -> StreamChunk[bytes]:
    """Return a whole answer and its usage. Nobody continues it, so its log probabilities are not sent beside it."""
    taken = replace(watch.take(), logprobs=())
    if (usage := answer.usage) is not None:
        taken = replace(taken, output_tokens=usage.completion_tokens or 0, prompt_tokens=usage.prompt_tokens)
    return StreamChunk(taken, answer.model_dump_json().encode())


def _named(refusal: HttpError, method: str, body: Mapping[str, Any]) -> HttpError:
    """Set ``param`` of an error to the field of the client's body. Return the error."""
    refusal = naming_field(refusal, body)
    return named_as_sent(refusal) if method == "generate" else refusal
