"""The input of a response as a list of items, page by page."""

from collections.abc import Mapping
from typing import Any, Literal

from openai.types.responses import ResponseItemList

from cluster.errors import BadRequest
from cluster.responses.conversation import error_text
from cluster.run_events import RunSpec

MOST_LISTED = 100


def input_items(spec: RunSpec, *, order: Literal["asc", "desc"], limit: int, after: str | None) -> ResponseItemList:
    """A page of the items that a request brought itself; those of earlier responses are theirs.

    Args:
        spec: of the response's run.
        order: the newest first is `desc`.
        limit: of the page.
        after: the page begins behind the item of this id.

    Raises:
        BadRequest: ``limit`` or ``after`` cannot be used.
    """
    if not 1 <= limit <= MOST_LISTED:
        raise BadRequest(f"limit must be between 1 and {MOST_LISTED}, not {limit}", param="limit")
    items = [_as_item(item) for item in spec.echo.get("input", ())]
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise BadRequest(f"there is no item {after[:256]!r} in the input", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    return ResponseItemList.model_validate(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(items) > limit,
        }
    )


def _as_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of the input as it is shown: whole, where the request was brief."""
    whole = {"status": "completed", **item}
    match item["type"]:
        case "message":
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            whole["content"] = [_as_part(part, kind) for part in _parts(item["content"])]
        case "function_call_output" if isinstance(item["output"], list):
            whole["output"] = [_as_part(part, "input_text") for part in item["output"]]
        case "reasoning":
            whole["summary"] = [{"type": "summary_text", **part} for part in item.get("summary", ())]
            whole["content"] = [{"type": "reasoning_text", **part} for part in item.get("content", ())]
        case "mcp_call" if "error" in item:
            content = [{"type": "text", "text": error_text(item["error"])}]
            whole |= {"error": {"type": "mcp_tool_execution_error", "content": content}, "status": "failed"}
        case "mcp_list_tools":
            whole["tools"] = []
    return whole


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"text": content}] if isinstance(content, str) else content


def _as_part(part: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if part.get("type") == "refusal":
        return dict(part)
    shown: dict[str, Any] = {"type": kind, "text": part["text"]}
    if kind == "output_text":
        shown["annotations"] = []
    return shown
