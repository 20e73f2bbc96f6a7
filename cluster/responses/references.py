"""Replaces references to items of stored responses with the items.

An item's id has the id of its response (`cluster.responses.output`), so no index of items is needed.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from cluster.core.errors import BadRequest
from cluster.responses.events import ResponseFold
from cluster.responses.input_items import AnyItem, ItemReference
from cluster.responses.output import RESPONSE_PREFIX
from cluster.responses.request import CreateResponse

MAX_REFERRED = 256
"""Largest number of responses whose items a request may name."""

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_[0-9a-z]+")
_items: TypeAdapter[Any] = TypeAdapter(AnyItem)


def referred(request: CreateResponse) -> set[str]:
    """Return the ids of the responses whose items the request names.

    Raises:
        BadRequest: there are more than `MAX_REFERRED`.
    """
    found = {response for _, item in _references(request) if (response := _response_of(item.id)) is not None}
    if len(found) > MAX_REFERRED:
        raise BadRequest(
            f"input: it refers to items of {len(found)} responses, of at most {MAX_REFERRED}; use previous_response_id",
            param="input",
        )
    return found


def resolved(request: CreateResponse, responses: Mapping[str, ResponseFold]) -> CreateResponse:
    """Return the request with the items themselves. References to items of a lost attempt, which a client may have seen
    in a stream, are left out.

    Args:
        request: the request.
        responses: those of the responses of `referred` that exist, by id.

    Raises:
        BadRequest: there is no item with an id (status 404).
    """
    replaced = {item_id for fold in responses.values() for item_id in fold.replaced}
    references = _references(request)
    if not references:
        return request
    items = {place: _item(place, item.id, responses) for place, item in references if item.id not in replaced}
    left_out = {place for place, item in references if item.id in replaced}
    given = [items.get(place, one) for place, one in enumerate(request.input) if place not in left_out]
    return request.model_copy(update={"input": given})


def _references(request: CreateResponse) -> list[tuple[int, ItemReference]]:
    if isinstance(request.input, str):
        return []
    return [(place, item) for place, item in enumerate(request.input) if isinstance(item, ItemReference)]


def _response_of(item_id: str) -> str | None:
    named = _ITEM_ID.fullmatch(item_id)
    return None if named is None else RESPONSE_PREFIX + named[1]


def _item(place: int, item_id: str, responses: Mapping[str, ResponseFold]) -> Any:
    fold = responses.get(_response_of(item_id) or "")
    if fold is not None:
        shown = [item.to_dict(mode="json") for item in fold.response.output]
        for item in (*shown, *fold.state.spec.echo.get("input", ())):
            if item["id"] == item_id:
                return _items.validate_python(item)
    param = f"input.{place}.id"
    message = f"{param}: Item with id {item_id!r} not found. Only items of stored responses are kept."
    raise BadRequest(message, status=404, param=param)
