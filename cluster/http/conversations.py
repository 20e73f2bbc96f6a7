"""`/v1/conversations`: OpenAI's Conversations API."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
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
    is_kept,
)
from cluster.responses.events import ResponseFold
from cluster.responses.input_items import AnyItem, page_of, shown_item
from cluster.responses.request import Metadata
from cluster.responses.spec import RunRequest
from cluster.responses.tools import OpenPart
from cluster.responses.wire import to_json
from cluster.store.client import StoreUnavailable
from cluster.store.conversations import MAX_CONVERSATIONS, RENEWED_SHARE, ConversationStore, StoredConversation, Written

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
        is_full: returns whether the store has no memory for more.
    """

    def __init__(self, store: ConversationStore, responses: StoredResponses, is_full: Callable[[], bool]) -> None:
        self._store = store
        self._responses = responses
        self._is_full = is_full

    async def get(self, tenant: str, name: str, param: str = "conversation_id") -> ConversationEntries:
        """Return a conversation with its responses.

        Args:
            tenant: the tenant.
            name: the id.
            param: the field that names it, for errors.

        Raises:
            BadRequest: there is none of this id (404).
            Overloaded: the store does not answer.
        """
        entries = await self._entries(tenant, name, param)
        names = [entry.response for entry in entries if isinstance(entry, Responded)]
        return ConversationEntries(name, entries, await self._responses.found(names, tenant))

    async def to_continue(self, tenant: str, name: str, param: str) -> ConversationEntries:
        """Return a conversation with those of its responses that `ConversationEntries.continuation` needs.

        It needs all where items were deleted, and otherwise the last one whose items belong to the conversation, and
        those after it. Those before it have ended. The arguments and exceptions are those of `get`.
        """
        entries = await self._entries(tenant, name, param)
        needs_all = any(isinstance(entry, Deleted) for entry in entries)
        found: dict[str, ResponseFold] = {}
        for entry in reversed(entries):
            if isinstance(entry, Responded):
                found |= await self._responses.found([entry.response], tenant)
                if is_kept(found.get(entry.response)) and not needs_all:
                    break
        return ConversationEntries(name, entries, found)

    async def _entries(self, tenant: str, name: str, param: str) -> tuple[Entry, ...]:
        stored = (await self.stored(tenant, name, param)).entries
        return await asyncio.to_thread(lambda: tuple(map(decode, stored)))

    async def stored(self, tenant: str, name: str, param: str = "conversation_id") -> StoredConversation:
        """Return a conversation as it is stored, and keep its responses as long as it is kept.

        Arguments and exceptions are those of `get`.
        """
        async with _answering():
            found = await self._store.load(tenant, name)
        if found is None:
            raise _not_found(name, param)
        if new := found.entries[found.renewed :]:
            names = await asyncio.to_thread(_responses_of, new)
            still_open = await self._responses.prolong([*filter(None, names)], tenant, 1 + RENEWED_SHARE)
            # One that has not ended, and those after it, are renewed at the next use.
            renewed = next((place for place, response in enumerate(names) if response in still_open), len(new))
            with suppress(StoreUnavailable):  # they are renewed at the next use
                await self._store.renewed(tenant, name, found.renewed + renewed, is_all=not found.renewed)
        return found

    async def create(self, tenant: str, name: str, metadata: bytes, entries: Sequence[Entry]) -> float:
        """Store a new conversation. Return the time of its creation in seconds.

        Raises:
            BadRequest: it is too large, or the tenant has too many, or too much in them.
            Overloaded: the store has no memory for it, or does not answer.
        """
        self._require_memory()
        created_s = time()
        async with _answering():
            _require(await self._store.create(tenant, name, created_s, metadata, _encoded(entries)), name)
        return created_s

    async def add(self, tenant: str, name: str, items: Sequence[Added]) -> None:
        """Append items.

        Raises:
            BadRequest: there is no conversation of this id (404), or it or the tenant has no room for them.
            Overloaded: the store has no memory for them, or does not answer.
        """
        self._require_memory()
        await self.stored(tenant, name)  # which keeps its responses, too
        await self._append(tenant, name, items)

    async def delete_item(self, tenant: str, name: str, item_id: str) -> None:
        """Delete an item. The arguments and exceptions are those of `add`, but it needs no free memory."""
        await self._append(tenant, name, [Deleted(item_id)])

    async def _append(self, tenant: str, name: str, entries: Sequence[Entry]) -> None:
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

    def _require_memory(self) -> None:
        if self._is_full():
            message = "the store (redis) has no memory for more items; retry later"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S, code="store_full")

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
            BadRequest: a field is invalid, or the tenant has too many conversations, or too much in them.
            Overloaded: the store has no memory for it, or does not answer.
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
            BadRequest: there is no conversation of this id (404), a field is invalid, or there is no room for them.
            Overloaded: the store has no memory for them, or does not answer.
        """
        entries: list[Added] = added(validated(NewItems, body).items)
        items = [shown_item(entry.item) for entry in entries]
        answer = _listed(page_of(items, order="asc", limit=MAX_ADDED, after=None))
        await self._conversations.add(tenant, name, entries)
        return answer

    async def items(
        self, tenant: str, name: str, *, order: Literal["asc", "desc"], limit: int, after: str | None
    ) -> Response:
        """List the items: those that were added, and those of responses that have ended.

        Raises:
            BadRequest: there is no conversation of this id (404), or the page is invalid.
        """
        found = await self._items(tenant, name)
        return _listed(page_of(found, order=order, limit=limit, after=after))

    async def item(self, tenant: str, name: str, item_id: str) -> Response:
        """Return an item.

        Raises:
            BadRequest: there is no conversation or no item of this id (404).
        """
        for item in await self._items(tenant, name):
            if item["id"] == item_id:
                return Response(to_json(_item.validate_python(item)), media_type="application/json")
        raise _no_item(item_id)

    async def delete_item(self, tenant: str, name: str, item_id: str) -> Response:
        """Delete an item. The next response does not read it.

        Raises:
            BadRequest: there is no conversation or no item of this id (404).
        """
        if all(item["id"] != item_id for item in await self._items(tenant, name)):
            raise _no_item(item_id)
        await self._conversations.delete_item(tenant, name, item_id)
        return await self.show(tenant, name)

    async def _items(self, tenant: str, name: str) -> list[dict[str, Any]]:
        found = await self._conversations.get(tenant, name)
        return await asyncio.to_thread(lambda: found.items)


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
        case Written.MANY:
            message = f"at most {MAX_CONVERSATIONS} conversations are kept; delete some"
            error = BadRequest(message, code="too_many_conversations")
        case Written.QUOTA:
            message = "all conversations would have more bytes than are kept; delete some (batches.max_stored_bytes)"
            error = BadRequest(message, param=param, code="storage_quota_exceeded")
    raise error


def _responses_of(entries: Sequence[bytes]) -> list[str | None]:
    """Return the id of each entry's response; None: the entry is none."""
    return [entry.response if isinstance(entry, Responded) else None for entry in map(decode, entries)]


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
