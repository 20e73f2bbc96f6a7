"""Conversations: what their entries are, the items that they have, and how a response continues one.

A response is an entry by its id alone, so that its items are stored once, and its exact token ids can be continued. It
becomes an entry when it is started. Its items belong to the conversation when it has ended, unless it failed.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from cluster.core.errors import BadRequest
from cluster.responses.events import ResponseFold
from cluster.responses.input_items import AnyItem, InputItem, ItemReference, OtherItem, shown_item, stored_input
from cluster.runs.state import RunState

CONVERSATION_PREFIX = "conv_"

ITEM_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "compaction": "cmp",
}
"""The first part of the id that an item without one gets, by its type."""

_items: TypeAdapter[Any] = TypeAdapter(AnyItem)


class Added(msgspec.Struct, frozen=True, tag="item"):
    """An item that a client added."""

    item: dict[str, Any]


class Responded(msgspec.Struct, frozen=True, tag="response"):
    """A response in the conversation."""

    response: str


class Deleted(msgspec.Struct, frozen=True, tag="deleted"):
    """An earlier item is no part of the conversation any more."""

    id: str


Entry = Added | Responded | Deleted

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """Encode an entry for the store."""
    return _encoder.encode(entry)


def decode(entry: bytes) -> Entry:
    """Decode an entry of the store.

    Raises:
        ValueError: ``entry`` is not a result of :func:`encode`.
    """
    return _decoder.decode(entry)


def added(items: Sequence[InputItem]) -> list[Added]:
    """Return the entries of new items. An item without an id gets one.

    Raises:
        BadRequest: an item is a reference, or of a type that the model does not read.
    """
    entries = []
    for place, item in enumerate(items):
        if isinstance(item, ItemReference | OtherItem):
            param = f"items.{place}.type"
            raise BadRequest(f"{param}: {item.type!r} cannot be added to a conversation", param=param)
        named = item.id or f"{ITEM_PREFIXES[item.type]}_{uuid.uuid4().hex}"
        entries.append(Added({**item.model_dump(mode="json", exclude_none=True), "id": named}))
    return entries


def is_kept(fold: ResponseFold | None) -> bool:
    """Return whether the items of a response belong to its conversation. None: it is not stored any more."""
    ended = None if fold is None else fold.state.ended
    return ended is not None and ended.status in ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class ConversationEntries:
    """A conversation, with its responses as far as they are still stored."""

    id: str
    entries: tuple[Entry, ...]
    responses: Mapping[str, ResponseFold]

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items, the oldest first, as they are shown."""
        newest_first: list[dict[str, Any]] = []
        gone: set[str] = set()
        for entry in reversed(self.entries):  # a deletion concerns the entries before it
            if isinstance(entry, Deleted):
                gone.add(entry.id)
            newest_first += [item for item in reversed(list(self._of(entry))) if item["id"] not in gone]
        return newest_first[::-1]

    def _of(self, entry: Entry) -> Iterator[dict[str, Any]]:
        if isinstance(entry, Added):
            yield shown_item(entry.item)
        elif isinstance(entry, Responded) and (fold := self._kept(entry)) is not None:
            yield from stored_input(fold.state.spec)
            yield from (item.to_dict(mode="json") for item in fold.response.output)

    def _kept(self, entry: Responded) -> ResponseFold | None:
        """Return a response whose items belong to the conversation."""
        fold = self.responses.get(entry.response)
        return fold if is_kept(fold) else None

    def continuation(self) -> tuple[RunState | None, tuple[InputItem, ...]]:
        """Return the run after which the next response continues, and the items since; None: all items.

        Raises:
            BadRequest: a response is in progress (409).
        """
        last, since = None, 0
        for place, entry in enumerate(self.entries):
            if not isinstance(entry, Responded):
                continue
            fold = self.responses.get(entry.response)
            if fold is not None and fold.state.ended is None:
                message = f"the response {entry.response!r} of this conversation is in progress"
                raise BadRequest(message, status=409, param="conversation", code="conversation_locked")
            if (kept := self._kept(entry)) is not None:
                last, since = kept.state, place + 1
        # The run has read items that were deleted since. The model must not see them again.
        if last is None or any(isinstance(entry, Deleted) for entry in self.entries):
            return None, tuple(_items.validate_python(item) for item in self.items)
        later = (entry for entry in self.entries[since:] if isinstance(entry, Added))
        return last, tuple(_items.validate_python(entry.item) for entry in later)
