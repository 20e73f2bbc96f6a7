"""`/v1/conversations`: OpenAI's Conversations API."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import time
from typing import Any, Literal
from uuid import uuid4

import msgspec
from openai.types.conversations import Conversation as ShownConversation
from openai.types.conversations import ConversationItem, ConversationItemList
from pydantic import Field, TypeAdapter
from starlette.responses import JSONResponse, Response

from cluster.api.openai import RETRY_AFTER_S
from cluster.api.validation import validated
from cluster.core.errors import BadRequest, HttpError, Overloaded
from cluster.http.stored_responses import StoredResponses
from cluster.responses.conversation_entries import (
    CONVERSATION_PREFIX,
    Added,
    ConversationEntries,
    Deleted,
    Entry,
    Responded,
    added,
    decode,
    encode,
)
from cluster.responses.input_items import AnyItem, page_of, shown_item
from cluster.responses.request import Metadata
from cluster.responses.spec import RunRequest
from cluster.responses.tools import OpenPart
from cluster.responses.wire import to_json
from cluster.store.client import StoreUnavailable
from cluster.store.conversations import ConversationStore, StoredConversation, Written

MAX_ADDED = 20
"""Largest number of items of a request, as OpenAI's."""

_item: TypeAdapter[Any] = TypeAdapter(ConversationItem)


class NewConversation(OpenPart):
    """The body of a new conversation."""

    items: list[AnyItem] | None = Field(None, max_length=MAX_ADDED)
    metadata: Metadata | None = None


class NewItems(OpenPart):
    """The body of new items."""

    items: list[AnyItem] = Field(min_length=1, max_length=MAX_ADDED)


class NewMetadata(OpenPart):
    """The body of a change."""

    metadata: Metadata


class Conversations:
    """The conversations in the store.

    Args:
        store: has their entries.
        responses: has their responses.
    """

    def __init__(self, store: ConversationStore, responses: StoredResponses) -> None:
        self._store = store
        self._responses = responses

    async def get(self, tenant: str, name: str, param: str = "conversation_id") -> ConversationEntries:
        """Return a conversation.

        Args:
            tenant: the tenant.
            name: the id.
            param: the field that names it, for errors.

        Raises:
            BadRequest: there is none of this id (404).
            Overloaded: the store does not answer.
        """
        entries = [decode(entry) for entry in (await self.stored(tenant, name, param)).entries]
        names = [entry.response for entry in entries if isinstance(entry, Responded)]
        return ConversationEntries(name, tuple(entries), await self._responses.found(names, tenant))

    async def stored(self, tenant: str, name: str, param: str = "conversation_id") -> StoredConversation:
        """Return a conversation as it is stored. Arguments and exceptions are those of `get`."""
        async with _answering():
            found = await self._store.load(tenant, name)
        if found is None:
            raise _not_found(name, param)
        return found

    async def create(self, tenant: str, name: str, metadata: bytes, entries: Sequence[Entry]) -> float:
        """Store a new conversation. Return the time of its creation in seconds."""
        created_s = time()
        async with _answering():
            _require(await self._store.create(tenant, name, created_s, metadata, _encoded(entries)), name)
        return created_s

    async def append(self, tenant: str, name: str, entries: Sequence[Entry]) -> None:
        """Append entries. Exceptions are those of `get`."""
        async with _answering():
            _require(await self._store.append(tenant, name, _encoded(entries)), name)

    async def describe(self, tenant: str, name: str, metadata: bytes) -> None:
        """Replace the metadata. Exceptions are those of `get`."""
        async with _answering():
            _require(await self._store.describe(tenant, name, metadata), name)

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a conversation. Its responses stay. Exceptions are those of `get`."""
        async with _answering():
            _require(await self._store.delete(tenant, name), name)

    async def add_response(self, run: RunRequest) -> None:
        """Add a response that is about to begin.

        Raises:
            BadRequest: another one was added since the request was read (409).
        """
        name = run.conversation or ""
        async with _answering():
            entries = _encoded([Responded(run.spec.id)])
            written = await self._store.append(run.spec.tenant, name, entries, known=run.known)
        _require(written, name, "conversation")


class ConversationRoutes:
    """The handlers of the routes.

    Args:
        conversations: has the conversations.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def create(self, tenant: str, body: Mapping[str, Any]) -> Response:
        """Make a conversation.

        Raises:
            BadRequest: a field is invalid.
        """
        wanted = validated(NewConversation, body)
        name = f"{CONVERSATION_PREFIX}{uuid4().hex}"
        metadata = msgspec.json.encode(wanted.metadata or {})
        created_s = await self._conversations.create(tenant, name, metadata, added(wanted.items or ()))
        return _shown(name, StoredConversation(created_s, metadata, ()))

    async def show(self, tenant: str, name: str) -> Response:
        """Return a conversation, without its items.

        Raises:
            BadRequest: there is none of this id (404).
        """
        return _shown(name, await self._conversations.stored(tenant, name))

    async def update(self, tenant: str, name: str, body: Mapping[str, Any]) -> Response:
        """Replace the metadata of a conversation.

        Raises:
            BadRequest: there is none of this id (404), or a field is invalid.
        """
        metadata = msgspec.json.encode(validated(NewMetadata, body).metadata)
        await self._conversations.describe(tenant, name, metadata)
        return await self.show(tenant, name)

    async def delete(self, tenant: str, name: str) -> Response:
        """Delete a conversation. Its responses stay.

        Raises:
            BadRequest: there is none of this id (404).
        """
        await self._conversations.delete(tenant, name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, tenant: str, name: str, body: Mapping[str, Any]) -> Response:
        """Add items at the end.

        Raises:
            BadRequest: there is no conversation of this id (404), or a field is invalid.
        """
        entries: list[Added] = added(validated(NewItems, body).items)
        items = [shown_item(entry.item) for entry in entries]
        answer = _listed(page_of(items, order="asc", limit=MAX_ADDED, after=None))
        await self._conversations.append(tenant, name, entries)
        return answer

    async def items(
        self, tenant: str, name: str, *, order: Literal["asc", "desc"], limit: int, after: str | None
    ) -> Response:
        """List the items: those that were added, and those of responses that have ended.

        Raises:
            BadRequest: there is no conversation of this id (404), or the page is invalid.
        """
        found = await self._conversations.get(tenant, name)
        return _listed(page_of(found.items, order=order, limit=limit, after=after))

    async def item(self, tenant: str, name: str, item_id: str) -> Response:
        """Return an item.

        Raises:
            BadRequest: there is no conversation or no item of this id (404).
        """
        for item in (await self._conversations.get(tenant, name)).items:
            if item["id"] == item_id:
                return Response(to_json(_item.validate_python(item)), media_type="application/json")
        raise _no_item(item_id)

    async def delete_item(self, tenant: str, name: str, item_id: str) -> Response:
        """Delete an item. The next response does not read it.

        Raises:
            BadRequest: there is no conversation or no item of this id (404).
        """
        if all(item["id"] != item_id for item in (await self._conversations.get(tenant, name)).items):
            raise _no_item(item_id)
        await self._conversations.append(tenant, name, [Deleted(item_id)])
        return await self.show(tenant, name)


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    try:
        yield
    except StoreUnavailable as error:
        raise Overloaded("the store of conversations cannot be reached now", retry_after_s=RETRY_AFTER_S) from error


def _require(written: Written, name: str, param: str = "conversation_id") -> None:
    error: HttpError
    match written:
        case Written.OK:
            return
        case Written.UNKNOWN:
            error = _not_found(name, param)
        case Written.MOVED:
            message = f"another response was added to the conversation {name!r} at the same time"
            error = BadRequest(message, status=409, param=param, code="conversation_locked")
        case Written.FULL:
            error = BadRequest(f"the conversation {name!r} is full; begin another", param=param)
    raise error


def _encoded(entries: Sequence[Entry]) -> list[bytes]:
    return [encode(entry) for entry in entries]


def _shown(name: str, stored: StoredConversation) -> Response:
    metadata = msgspec.json.decode(stored.metadata)
    shown = ShownConversation(id=name, created_at=int(stored.created_s), metadata=metadata, object="conversation")
    return Response(to_json(shown), media_type="application/json")


def _listed(page: Mapping[str, Any]) -> Response:
    return Response(to_json(ConversationItemList.model_validate(page)), media_type="application/json")


def _not_found(name: str, param: str) -> BadRequest:
    return BadRequest(f"Conversation with id {name[:256]!r} not found.", status=404, param=param)


def _no_item(item_id: str) -> BadRequest:
    return BadRequest(f"Item with id {item_id[:256]!r} not found in the conversation.", status=404, param="item_id")
