"""Messages whose tools the cluster runs: `/v1/messages` with `server_side` tools or MCP servers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from cluster.api.anthropic.request import MessagesRequest, Prompt
from cluster.api.anthropic.servers import check_untaken
from cluster.config.model_features import seeing_models
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, ToolRefused
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome
from cluster.core.tools import ToolOffer
from cluster.http.idempotency import read_idempotency
from cluster.http.runs import Abandon, Offers, limits
from cluster.runs.events import Generated, RunEvent
from cluster.runs.messages_api import MESSAGE_PREFIX, messages_spec, run_offers
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.records import Idempotency


class RunClient:
    """The client that waits for a run, whose turns the runner measures. The run is cancelled if the client leaves.

    Args:
        run_id: the run.
        abandon: cancels a run.
        stays: whether the run goes on without its client, because the client may repeat the request.
    """

    def __init__(self, run_id: str, abandon: Abandon, *, stays: bool) -> None:
        self._run_id = run_id
        self._abandon = abandon
        self._waits = not stays

    def received(self, tokens: int) -> None:
        """Do nothing: the runner counts the tokens."""

    def takes_alone(self, alone_s: float | None) -> None:
        """Do nothing: the runner records it."""

    def over(self, outcome: Outcome | None) -> None:
        """Record that the run has ended, or cannot be followed."""
        if outcome is Outcome.OK:
            self._waits = False

    def gone(self) -> None:
        """Cancel the run if it has not ended."""
        if self._waits:
            self._waits = False
            self._abandon(self._run_id)


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A run that was started for a request."""

    events: AsyncIterator[RunEvent]
    client: RunClient
    wall_s: float
    """Largest duration of the run in seconds."""


class MessagePrograms:
    """Starts the runs of messages.

    Args:
        runner: runs the programs.
        offers: lists the tools.
        config: the whole configuration.
    """

    def __init__(self, runner: ProgramRunner, offers: Offers, config: CaesuraConfig) -> None:
        self._runner = runner
        self._offers = offers
        self._config = config
        self._seeing = seeing_models(config)
        self._abandon = Abandon(runner)

    async def offered(self, prompt: Prompt, body: Mapping[str, Any], tenant: str) -> tuple[ToolOffer, ...]:
        """Return the tools that the model may call.

        Args:
            prompt: the request's prompt.
            body: the chat completion that is made of it.
            tenant: the tenant of the request.

        Raises:
            BadRequest: a tool is unknown, a server cannot be reached or is not allowed, or two tools have one name.
        """
        check_untaken(prompt.servers, self._config.tools.defined)
        try:
            listed = await self._offers(tenant, {one.name: one.whole() for one in prompt.servers} or None)
        except ToolRefused as error:
            raise BadRequest(f"mcp_servers: {error}", param="mcp_servers") from error
        return run_offers(prompt, [tool["function"] for tool in body.get("tools", ())], listed)

    async def begin(
        self,
        http: Request,
        request: MessagesRequest,
        prompt: Prompt,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        arrived_s: float | None = None,
    ) -> BegunRun:
        """Start the run of a request.

        Args:
            http: the request, whose body has been read.
            request: the body.
            prompt: its prompt.
            body: the chat completion that is made of it, with the id of its model.
            identity: the identity of its program.
            arrived_s: time of the arrival by the runner's clock; None: now.

        Raises:
            HttpError: the request is invalid, or the run was not accepted.
        """
        idempotency = read_idempotency(http, "messages")
        run_id = await self._start(request, prompt, body, identity, idempotency, arrived_s)
        client = RunClient(run_id, self._abandon, stays=idempotency is not None)
        return BegunRun(self._events(run_id, bool(request.stream)), client, limits(self._config).wall_s)

    async def _start(
        self,
        request: MessagesRequest,
        prompt: Prompt,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        idempotency: Idempotency | None,
        arrived_s: float | None,
    ) -> str:
        """Return the id of the request's run. A repeated request has its earlier run."""
        try:
            spec = messages_spec(
                request,
                body,
                run_id=f"{MESSAGE_PREFIX}{uuid4().hex}",
                created_s=time(),
                identity=identity,
                limits=limits(self._config),
                prompt=prompt,
                offers=await self.offered(prompt, body, identity.tenant),
                sees=body["model"] in self._seeing,
            )
        except BadRequest:
            if (run_id := await self._runner.repeated(identity.tenant, idempotency)) is None:
                raise
            return run_id
        secrets = {one.name: one.secret for one in prompt.servers if one.secret}
        started = await self._runner.start(spec, idempotency=idempotency, secret=secrets or None, arrived_s=arrived_s)
        return started.run_id

    async def _events(self, run_id: str, streamed: bool) -> AsyncIterator[RunEvent]:
        """Yield a run's events. Those of pieces are left out of an answer that is not a stream."""
        batches: AsyncIterator[Sequence[RunEvent]] = self._runner.follow(run_id)
        async with aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                for event in batch:
                    if streamed or not isinstance(event, Generated):
                        yield event
