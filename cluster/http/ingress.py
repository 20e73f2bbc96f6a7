"""The HTTP ingress: OpenAI's routes, programs, probes and administration, over handles of the replicas.

The ingress checks the limits of a turn (`http.body`) and reads its identity (`core.identity`). It sends the turn to the
replica that has the program (`session_id` of the handle), and passes the answer on as bytes (`api.sse`). vLLM's own
models validate bodies in the replica. The ingress does not import vLLM, so that it starts in a third of the time.
"""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from time import time
from typing import Any, Literal, Protocol
from uuid import uuid4

from fastapi import Request
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response

from cluster.api.anthropic.errors import VERSION_HEADER
from cluster.api.generate import completion_of, named_as_sent
from cluster.api.openai import (
    BATCH_LINE,
    RETRY_AFTER_S,
    no_model,
)
from cluster.api.ray_errors import as_http_error
from cluster.api.sse import Answers, EventStream
from cluster.auth.keys import key_file
from cluster.auth.middleware import caller_of
from cluster.auth.tenants import Tenants
from cluster.batches.records import Endpoint
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import BadRequest, Overloaded
from cluster.core.lineage import Attributed, Attribution, LineageIndex
from cluster.core.malloc_trim import freeze_heap, keep_trimmed
from cluster.core.program import ProgramIdentity
from cluster.dispatch.predictions import predictions
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.http.administration import Administration
from cluster.http.application import application
from cluster.http.attributed_answers import AttributedAnswers
from cluster.http.batch_lines import Handler
from cluster.http.batch_service import BatchService
from cluster.http.browsers import cors
from cluster.http.chat import ChatPrograms
from cluster.http.conversations import ConversationRoutes, Conversations
from cluster.http.early_prefill import prefill
from cluster.http.message_programs import MessagePrograms
from cluster.http.messages import MessageRoutes, model_info, model_list
from cluster.http.requests import (
    Translation,
    TurnReader,
    answered,
    model_card,
    passed_headers,
    versions,
)
from cluster.http.response_sockets import ResponseSockets
from cluster.http.responses import ResponseRoutes
from cluster.http.routes import ProgramRoutes, ToolRoutes
from cluster.http.server import HttpServer
from cluster.http.services import ProgramService
from cluster.http.stored_responses import StoredResponses
from cluster.http.token_records import TokenRecordRoutes
from cluster.http.weights import WeightRoutes
from cluster.observing.logs import configure as configure_logs
from cluster.observing.meter import Meter
from cluster.observing.scrape import ClusterScrape
from cluster.observing.slo_tracker import MeasuredAnswers, SloTracker, set_process_tracker
from cluster.observing.tracing import traces
from cluster.proxy.graceful_shutdown import GracefulShutdown
from cluster.proxy.middleware import guarded
from cluster.responses.wire import build_models
from cluster.runs.chat_api import asks_for_loop

READY_TIMEOUT_S = 5.0


class Part(Protocol):
    """A component that an ingress has opened."""

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        ...

    async def aclose(self) -> None:
        """Stop its background loops and close its connections. No request uses it any more."""
        ...


def ingress_class(config: CaesuraConfig) -> type[Any]:
    """Make the deployment class, for requests that Ray's proxy or HAProxy forwards."""
    # Each app has a class of its own, since Ray binds the routes to the class that it is given.
    own = type(
        "Ingress",
        (ProgramIngress,),
        {
            name: value
            for part in (Administration, ProgramIngress)
            for name, value in vars(part).items()
            if callable(value) and not name.startswith("_")
        },
    )
    app = application(config, lambda name: getattr(own, name))
    made: type[Any] = serve.ingress(app)(own)
    return made


class ProgramIngress(Administration):
    """The handlers of the routes. The docstring of a handler appears in /docs."""

    _parts: tuple[Part, ...] = ()
    """The components that run in the background, in the order in which they were opened."""
    _server: HttpServer | None = None
    """The own HTTP server. None: a proxy has the clients' connections."""
    _requests: GracefulShutdown | None = None
    """The requests of the own HTTP server that are in flight."""

    async def __init__(  # type: ignore[misc]
        self, replicas: dict[str, DeploymentHandle], config: CaesuraConfig, predictor: DeploymentHandle | None = None
    ) -> None:
        configure_logs(config.logs, "ingress")
        try:
            await self._open(replicas, config, predictor)
        except BaseException:
            await self.__del__()
            raise

    async def _open(
        self, replicas: dict[str, DeploymentHandle], config: CaesuraConfig, predictor: DeploymentHandle | None
    ) -> None:
        self._config = config
        self._started = int(time())
        clock, name = MonotonicClock(), f"ingress-{uuid4().hex}"
        self._predictions = predictions(config, clock, name, predictor)
        self._traces = traces(config, "ingress")
        self._turns = SloTracker.for_ingresses(config, clock, config.http.ingress_replicas)
        parts_of_turns = (self._predictions, self._traces, self._turns.counts)
        self._fleet = ReplicaClients(replicas, config, clock, name, *parts_of_turns)
        self._service = ProgramService(self._fleet, config, clock, name, self._turns, self._traces)
        parts = (self._service.runner, self._service.offers, config, as_http_error)
        runner = self._service.runner
        conversations = Conversations(
            self._service.conversations, StoredResponses(runner), lambda: runner.memory.is_full_for_storing
        )
        self._lineage = LineageIndex()
        self._responses = ResponseRoutes(*parts, conversations, self._fleet.plain, self._lineage)
        self._conversations = ConversationRoutes(conversations)
        self._chat_programs = ChatPrograms(*parts, self._lineage)
        self._programs = ProgramRoutes(self._service.runner, self._fleet)
        self._token_records = TokenRecordRoutes(self._fleet.recordings.store)
        self._weights = WeightRoutes(self._fleet, config, clock)
        self._adopt(self._weights)
        self._tools = ToolRoutes(self._service.offers, self._service.durations.read)
        self._tenants = Tenants(config)
        self._adapters = config.adapters
        self._reader = TurnReader(config, self._fleet.classes)
        self._messages = MessageRoutes(
            self._fleet,
            MessagePrograms(self._service.runner, self._service.offers, config),
            self._reader,
            self._turns,
            self._lineage,
            config.http.request_timeout_s,
            as_http_error,
        )
        handlers: dict[Endpoint, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/responses": self.create_response,
        }
        self._batches = BatchService(config, clock, name, self._service.runner, handlers)
        self._scrape = ClusterScrape(clock, Meter(enabled=config.metrics.enabled))
        set_process_tracker(self._turns)
        self._turns.open()
        self._adopt(self._turns)
        if config.auth.file is not None:
            keys = key_file(Path(config.auth.file))
            keys.open()
            keys.watch(config.auth.reload_s)
            self._adopt(keys)
        self._fleet.open()
        self._adopt(self._fleet)
        self._adopt(self._service)
        await self._service.open()
        self._adopt(self._batches)
        self._batches.open()
        build_models()
        keep_trimmed()
        freeze_heap()
        if await _proxies_are_disabled():
            http = config.http
            routes = application(config, lambda name: getattr(self, name), http.host)
            self._requests = GracefulShutdown(routes, runner.leave_abandoned)
            most, max_bytes = http.max_concurrent_requests, http.max_body_bytes
            server = guarded(self._requests, most, cors(http.cors_origins))
            app = ResponseSockets(server, http.cors_origins, most, max_bytes)
            self._server = HttpServer(app, http.host, http.port, max_bytes)
            self._adopt(self._server)

    async def shut_down(self, within_s: float) -> int:
        """Accept no more requests, and return when none is in flight. The whole cluster ends then.

        Programs that the cluster runs stay open if their clients' connections are ended.

        Args:
            within_s: seconds after which the requests in flight end with an error.

        Returns:
            The number of requests that ended with an error. It is 0 if a proxy has the connections.
        """
        if self._server is None or self._requests is None:
            self._service.runner.leave_abandoned()
            return 0
        self._server.stop_accepting()
        return await self._requests.shut_down(within_s)

    def _adopt(self, part: Part) -> None:
        """Register a part. It is closed before those registered earlier, and `check_health` reports its failing
        loops.
        """
        self._parts = (*self._parts, part)

    async def __del__(self) -> None:
        """Close all parts, even if one of them raises. Ray Serve calls it before this process ends."""
        async with AsyncExitStack() as stack:
            parts, self._parts = self._parts, ()
            if hasattr(self, "_traces"):
                stack.push_async_callback(asyncio.to_thread, self._traces.close)
            if hasattr(self, "_reader"):
                stack.push_async_callback(self._reader.aclose)
            if hasattr(self, "_scrape"):
                stack.push_async_callback(self._scrape.aclose)
            for part in parts:
                stack.push_async_callback(part.aclose)

    async def check_health(self) -> None:
        """Check the background loops. Ray Serve calls it, and replaces this process if it raises.

        Raises:
            RuntimeError: a background loop keeps failing.
        """
        if failed := [name for part in self._parts for name in part.failed]:
            raise RuntimeError(f"background loops keep failing: {', '.join(failed)}")

    # --- turns --------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Create a chat completion (OpenAI), with or without streaming and tools."""
        return await self._turn(request, "chat")

    async def prefill(self, request: Request) -> Response:
        """Compute the next prompt of a program while its tools run. The body is that of the next chat completion, as
        far as it is known.
        """
        body, identity = await self._reader.identified(request)
        return await prefill(self._fleet, body, identity, self._config.http.request_timeout_s)

    async def completions(self, request: Request) -> Response:
        """Create a completion (OpenAI). The prompt may be token ids. With `return_token_ids`, the answer has token ids
        too.
        """
        return await self._turn(request, "completions")

    async def generate(self, request: Request) -> Response:
        """Generate token ids from token ids, in the form of vLLM's own server, with or without streaming."""
        try:
            return await self._turn(request, "generate", completion_of)
        except BadRequest as error:
            raise named_as_sent(error) from error

    async def _turn(self, request: Request, method: str, translate: Translation | None = None) -> Response:
        arrived_s = self._turns.arrival_s(request.headers)
        sent, identity = await self._reader.sent(request, translate)
        prepare = partial(self._reader.prepared, request, sent, identity)
        if method == "chat" and asks_for_loop(sent):
            return await self._chat_programs.create(request, sent, identity, prepare, arrived_s)
        body = await prepare()
        of_batch = BATCH_LINE in request.scope
        answers = self._attributed(method, body, identity, passed_headers(request.headers), arrived_s, of_batch)
        response = await self._answered(answers, is_stream=body.get("stream") is True)
        answers.name_program(response)
        if not isinstance(response, EventStream):
            answers.cancel()
        return response

    def _attributed(
        self,
        method: str,
        body: dict[str, Any],
        identity: ProgramIdentity,
        headers: dict[str, str],
        arrived_s: float,
        of_batch: bool,
    ) -> AttributedAnswers:
        """Return the answer to a turn, as a turn of the program that it belongs to. A line of a batch that names none
        belongs to none.
        """
        if of_batch and identity.program_id is None:
            turn = Attributed(identity, Attribution.UNKNOWN)
        else:
            turn = self._lineage.attribute(identity, body)
        try:
            measured = MeasuredAnswers(
                self._fleet.answers(method, body, headers, turn.identity),
                self._turns.begin(body["model"], turn.identity, arrived_s, is_repeated=of_batch),
                as_http_error,
            )
        except BaseException:
            self._lineage.ended(turn, served=False)
            raise
        return AttributedAnswers(measured, self._lineage, turn)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, or of messages in the model's chat template."""
        return await self._plain(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        return await self._plain(request, "detokenize")

    async def _plain(self, request: Request, method: str) -> Response:
        body = await self._reader.body(request)
        async with asyncio.timeout(self._config.http.request_timeout_s):
            answer = await self._fleet.plain(method, body, passed_headers(request.headers))
        return Response(answer, media_type="application/json")

    async def _answered(self, answers: Answers, *, is_stream: bool) -> Response:
        return await answered(answers, self._config.http.request_timeout_s, as_http_error, is_stream=is_stream)

    async def create_message(self, request: Request) -> Response:
        """Create a message (Anthropic), with or without streaming and tools."""
        return await self._messages.create(request)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a message's prompt (Anthropic), with the model's chat template and the tools."""
        return await self._messages.count_tokens(request)

    # --- responses ----------------------------------------------------------------------------------------------------

    async def create_response(self, request: Request) -> Response:
        """Create a response (OpenAI), which is a complete program in one request. The cluster runs tools that are
        registered (`server_side: true`) or on an MCP server that the request brings.
        """
        arrived_s = self._turns.arrival_s(request.headers)
        sent, identity = await self._reader.sent(request)
        prepare = partial(self._reader.prepared, request, sent, identity)
        return await self._responses.create(request, sent, identity, prepare, arrived_s)

    async def count_response_tokens(self, request: Request) -> Response:
        """Count the tokens of a response's prompt (OpenAI), with the model's chat template and the tools."""
        body, identity = await self._reader.identified(request)
        return await self._responses.count_tokens(request, body, identity)

    async def compact_response(self, request: Request) -> Response:
        """Return a conversation (OpenAI) whose middle is replaced with a summary, which the model writes."""
        arrived_s = self._turns.arrival_s(request.headers)
        body, identity = await self._reader.identified(request)
        return await self._responses.compact(request, body, identity, arrived_s)

    async def response(
        self, request: Request, response_id: str, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        """Return a response in its current state, or stream its events after a number."""
        tenant = caller_of(request).tenant
        return await self._responses.show(tenant, response_id, stream=stream, starting_after=starting_after)

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Cancel a response. One that has ended does not change, and an unknown id gets 404."""
        return await self._responses.cancel(caller_of(request).tenant, response_id)

    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Delete a response that has ended."""
        return await self._responses.delete(caller_of(request).tenant, response_id)

    async def input_items(
        self,
        request: Request,
        response_id: str,
        order: Literal["asc", "desc"] = "desc",
        limit: int = 20,
        after: str | None = None,
    ) -> Response:
        """List the items of a response's input."""
        tenant = caller_of(request).tenant
        return await self._responses.input_items(tenant, response_id, order=order, limit=limit, after=after)

    # --- conversations ------------------------------------------------------------------------------------------------

    async def create_conversation(self, request: Request) -> Response:
        """Make a conversation (OpenAI), to which responses are added that name it as their `conversation`."""
        body = await self._reader.items(request)
        return await self._conversations.create(caller_of(request).tenant, body)

    async def conversation(self, request: Request, conversation_id: str) -> Response:
        """Return a conversation, without its items."""
        return await self._conversations.show(caller_of(request).tenant, conversation_id)

    async def update_conversation(self, request: Request, conversation_id: str) -> Response:
        """Replace the metadata of a conversation."""
        body = await self._reader.json(request)
        return await self._conversations.update(caller_of(request).tenant, conversation_id, body)

    async def delete_conversation(self, request: Request, conversation_id: str) -> Response:
        """Delete a conversation. Its responses stay."""
        return await self._conversations.delete(caller_of(request).tenant, conversation_id)

    async def add_conversation_items(self, request: Request, conversation_id: str) -> Response:
        """Add items at the end of a conversation."""
        body = await self._reader.items(request)
        return await self._conversations.add_items(caller_of(request).tenant, conversation_id, body)

    async def conversation_items(
        self,
        request: Request,
        conversation_id: str,
        order: Literal["asc", "desc"] = "desc",
        limit: int = 20,
        after: str | None = None,
    ) -> Response:
        """List the items of a conversation."""
        tenant = caller_of(request).tenant
        return await self._conversations.items(tenant, conversation_id, order=order, limit=limit, after=after)

    async def conversation_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Return an item of a conversation."""
        return await self._conversations.item(caller_of(request).tenant, conversation_id, item_id)

    async def delete_conversation_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Delete an item of a conversation. The next response does not read it."""
        return await self._conversations.delete_item(caller_of(request).tenant, conversation_id, item_id)

    # --- batches ------------------------------------------------------------------------------------------------------

    async def create_file(self, request: Request) -> Response:
        """Store a file of JSON lines (OpenAI), whose requests a batch answers. The purpose is `batch`."""
        return await self._batches.file_routes.create(request)

    async def files(
        self,
        request: Request,
        order: Literal["asc", "desc"] = "desc",
        limit: int = 10_000,
        after: str | None = None,
        purpose: str | None = None,
    ) -> Response:
        """List the files of the caller's tenant."""
        tenant = caller_of(request).tenant
        return await self._batches.file_routes.list(tenant, order=order, limit=limit, after=after, purpose=purpose)

    async def file(self, request: Request, file_id: str) -> Response:
        """Return a file, without its content."""
        return await self._batches.file_routes.show(caller_of(request).tenant, file_id)

    async def delete_file(self, request: Request, file_id: str) -> Response:
        """Delete a file. The input of a batch that has not ended cannot be deleted."""
        return await self._batches.file_routes.delete(caller_of(request).tenant, file_id)

    async def file_content(self, request: Request, file_id: str) -> Response:
        """Return the content of a file."""
        return await self._batches.file_routes.content(caller_of(request).tenant, file_id)

    async def create_batch(self, request: Request) -> Response:
        """Start a batch (OpenAI), which answers the requests in a file when the replicas have nothing else to do."""
        return await self._batches.batch_routes.create(request, await self._reader.json(request))

    async def batches(self, request: Request, limit: int = 20, after: str | None = None) -> Response:
        """List the batches of the caller's tenant, the newest first."""
        return await self._batches.batch_routes.list(caller_of(request).tenant, limit=limit, after=after)

    async def batch(self, request: Request, batch_id: str) -> Response:
        """Return a batch, with the numbers of its requests that have ended."""
        return await self._batches.batch_routes.show(caller_of(request).tenant, batch_id)

    async def cancel_batch(self, request: Request, batch_id: str) -> Response:
        """Cancel a batch. What has been answered by then is in its output file."""
        return await self._batches.batch_routes.cancel(caller_of(request).tenant, batch_id)

    # --- models and programs ------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """List the served models that the caller may use. With the header `anthropic-version`, in Anthropic's form."""
        tenant = caller_of(request).tenant
        every: dict[str, str | None] = {**dict.fromkeys(self._config.served), **self._adapters}
        allowed = {model: parent for model, parent in every.items() if self._tenants.may_name(tenant, model)}
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_list(list(allowed), self._started))
        cards = [
            model_card(model, self._started, await self._fleet.max_model_len(parent or model), parent)
            for model, parent in allowed.items()
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request, model_id: str) -> Response:
        """Return a model's id and largest context. 404 if it is not served, or the tenant may not use it."""
        parent = self._adapters.get(model_id)
        if (parent or model_id) not in self._config.served or not self._tenants.may_name(
            caller_of(request).tenant, model_id
        ):
            raise no_model(model_id)
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_info(model_id, self._started))
        largest = await self._fleet.max_model_len(parent or model_id)
        return JSONResponse(model_card(model_id, self._started, largest, parent))

    async def programs(self, request: Request, limit: int = 100, after: str | None = None) -> Response:
        """List the programs of clients and of the cluster, the one that was seen last first. `after` is the id of the
        last program of the page before.
        """
        return await self._programs.list(caller_of(request).tenant, limit, after)

    async def program(self, request: Request, program_id: str, include: str = "") -> Response:
        """Return a program: its phase, turns, pauses and decisions from the replica that has it, and its runs in the
        cluster. With `include=token_ids`, the answer has the exact token ids of every turn too.
        """
        tenant = caller_of(request).tenant
        return await self._programs.show(tenant, program_id, token_ids="token_ids" in include.split(","))

    async def cancel_program(self, request: Request, program_id: str) -> Response:
        """Cancel all runs of a program in the cluster."""
        return await self._programs.cancel(caller_of(request).tenant, program_id)

    async def token_records(self, request: Request, limit: int = 100, after: str | None = None) -> Response:
        """List the programs with recorded tokens (`x-record: tokens`), each with the bytes of its record. `after` is
        the id of the last program of the page before.
        """
        return await self._token_records.list(caller_of(request).tenant, limit, after)

    async def program_tokens(self, request: Request, program_id: str, limit: int = 20, after: int = 0) -> Response:
        """Return the recorded turns of a program: the token ids of each prompt and answer, the log probabilities, and
        the versions of the weights. `after` is the number of the last turn of the page before.
        """
        return await self._token_records.show(caller_of(request).tenant, program_id, limit, after)

    async def delete_program_tokens(self, request: Request, program_id: str, last_turn: int = 0) -> Response:
        """Delete the recorded turns of a program. With `last_turn`, only if the program has no later turn."""
        return await self._token_records.delete(caller_of(request).tenant, program_id, last_turn)

    async def tools(self, request: Request) -> Response:
        """List the registered tools that the caller may use, with the run times and queue times of each. Keys with the
        role `admin` also get those of each class of calls (`argument_class`).
        """
        return await self._tools.list(caller_of(request))

    async def metrics(self) -> Response:
        """Return Caesura's and vLLM's metrics of the whole cluster, in Prometheus's text format."""
        return await self._scrape.response()

    # --- probes -------------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """Return 200 if this process is alive. No replica is called."""
        return JSONResponse({"status": "alive"})

    async def ready(self) -> Response:
        """Return 200 if a model answers, or else 503 with Retry-After."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._fleet.ready()
        except Exception as error:  # a probe: whatever keeps the model from answering is its answer
            raise Overloaded(
                f"no model answers: {as_http_error(error).message}", retry_after_s=RETRY_AFTER_S
            ) from error
        return JSONResponse({"status": "ready", "model": self._config.model.id})

    async def version(self) -> Response:
        """Return the versions of Caesura, vLLM and Ray."""
        return versions()


async def _proxies_are_disabled() -> bool:
    """Return whether Ray Serve has no proxies, so that each ingress listens itself."""
    location = await _get_global_client()._controller.get_proxy_location.remote()
    return bool(location == ProxyLocation.Disabled)
