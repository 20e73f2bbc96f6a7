"""Reads requests for responses, with what they need that is not in their bodies: stored responses and tools."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any
from uuid import uuid4

from cluster.config.model_features import seeing_models
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, ToolRefused
from cluster.core.program import ProgramIdentity
from cluster.core.tools import ToolId, ToolOffer, ToolSource
from cluster.http.connection_responses import ConnectionResponses
from cluster.http.conversations import Conversations
from cluster.http.runs import Offers, limits
from cluster.http.stored_responses import StoredResponses
from cluster.observing import catalogue as metrics
from cluster.observing.meter import Meter
from cluster.responses.offers import brought
from cluster.responses.output import RESPONSE_PREFIX
from cluster.responses.references import referred
from cluster.responses.request import CreateResponse, counted_as, read_request
from cluster.responses.spec import RequestContext, RunRequest, run_spec
from cluster.responses.tools import FunctionTool
from cluster.runs.state import RunState


class ResponseRequests:
    """Makes runs of requests.

    Args:
        stored: has the stored responses.
        conversations: has the conversations.
        offers: lists the tools.
        config: the whole configuration.
    """

    def __init__(
        self, stored: StoredResponses, conversations: Conversations, offers: Offers, config: CaesuraConfig
    ) -> None:
        self._stored = stored
        self._conversations = conversations
        self._offers = offers
        self._config = config
        self._seeing = seeing_models(config)
        self._meter = Meter(enabled=config.metrics.enabled)

    def read(self, body: Mapping[str, Any]) -> CreateResponse:
        """Parse a body, and count what has no effect.

        Raises:
            BadRequest: a field is not valid, or has no effect and the configuration refuses such fields.
        """
        request = read_request(body)
        names = request.ignored
        if names and self._config.http.unknown_fields == "refuse":
            raise BadRequest(f"{names[0]}: it has no effect here (http.unknown_fields is refuse)", param=names[0])
        for name in names:
            self._meter.add(metrics.IGNORED_PARTS, 1, part=counted_as(name))
        return request

    async def run(
        self,
        request: CreateResponse,
        identity: ProgramIdentity,
        own: ConnectionResponses | None = None,
        run_id: str | None = None,
    ) -> RunRequest:
        """Return the run that a request asks for.

        Args:
            request: the request.
            identity: its identity.
            own: responses of the same connection, which it may continue even if they are not stored. None: the request
                came over no such connection.
            run_id: the id of the run. None: a new one.

        Raises:
            BadRequest: a field is not valid, or names what does not exist.
        """
        servers = brought(request, self._config.tools.defined)
        offered: Sequence[ToolOffer] = ()
        if servers.definitions or any(
            isinstance(one.tool, FunctionTool) and one.tool.server_side for one in request.functions
        ):
            try:
                offered = await self._offers(identity.tenant, servers.whole() or None)
            except ToolRefused as error:
                raise BadRequest(f"tools: {error}", param="tools") from error
        theirs = {label: [one for one in offered if _is_of(one.tool, label)] for label in servers.definitions}
        model = request.model or self._config.model.id
        around = RequestContext(
            run_id=run_id or f"{RESPONSE_PREFIX}{uuid4().hex}",
            created_s=time(),
            identity=identity,
            model=model,
            sees=model in self._seeing,
            limits=limits(self._config),
            registered={one.name: one for one in offered if one.tool and one.tool.source is ToolSource.OPERATOR},
            listings=theirs,
            previous=await self._previous(request.previous_response_id, identity.tenant, own),
            continuable=own is not None,
            referred=await self._stored.found(referred(request), identity.tenant),
        )
        if request.conversation is None:
            return run_spec(request, around)
        name = request.conversation.id
        conversation = await self._conversations.to_continue(identity.tenant, name, "conversation")
        previous, earlier = await asyncio.to_thread(conversation.continuation)
        return run_spec(request, replace(around, previous=previous, earlier=earlier, known=len(conversation.entries)))

    async def _previous(self, response_id: str | None, tenant: str, own: ConnectionResponses | None) -> RunState | None:
        if response_id is None:
            return None
        if own is not None and (state := own.last_state(response_id)) is not None:
            return state
        # `run_spec` reports a missing one, by its field.
        found = await self._stored.found([response_id], tenant, own or ())
        return found[response_id].state if found else None


def _is_of(tool: ToolId | None, label: str) -> bool:
    """Return whether a tool is one of the request's server of this label."""
    return tool is not None and tool.source is ToolSource.REQUEST and tool.entry == label
