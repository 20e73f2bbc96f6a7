"""The tools of a Messages request: functions of the client, Anthropic's client tools, and tools that the cluster runs.

Anthropic trained its models on its client tools (`bash_...`, `text_editor_...`), so that a request names only their
type. Other models need a schema, which is added here. Tools that only Anthropic's servers run (`web_search_...`) are
left out, and the response says so, because a client that sends one works without it too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.api.anthropic.blocks import Cacheable, Part
from cluster.core.errors import BadRequest
from cluster.core.tools import ToolOffer, function_object

NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")
"""Beginnings of the types of tools that the provider runs."""
CLUSTER_SERVER = "caesura"
"""The `server_name` of a call of a tool of no MCP server: a registered tool, or one that does not exist."""
_TYPE = re.compile(r"[a-z0-9_]{1,64}")
TOOLSET = "mcp_toolset"
"""The type of an entry that selects tools of an MCP server of the request, see `cluster.api.anthropic.servers`."""


class ToolConfig(Part):
    """Whether a tool of a toolset is offered."""

    enabled: bool | None = None


class Tool(Cacheable):
    """A tool of the request."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    server_side: bool | None = None
    """Caesura's: the cluster runs its registered tool of this name."""
    mcp_server_name: str | None = None
    default_config: ToolConfig | None = None
    configs: dict[str, ToolConfig] | None = None


class ToolChoice(Part):
    """Which tools a turn may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def _object(required: Sequence[str], **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_RANGE = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_EDITS = {"enum": ["view", "create", "str_replace", "insert"]}
_EDITED: Mapping[str, Mapping[str, Any]] = {
    "path": _STRING,
    "view_range": _RANGE,
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": _INTEGER,
    "insert_text": _STRING,
}
"""Properties of an edit of a file, by the text editor and by the memory."""
_MEMORY = {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]}

CLIENT_TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Runs a command in a persistent bash session, or restarts the session.",
        _object((), command=_STRING, restart={"type": "boolean"}),
    ),
    "text_editor_": (
        "Views, creates and edits files.",
        _object(
            ("command", "path"),
            command=_EDITS,
            **_EDITED,
        ),
    ),
    "memory_": (
        "Views, creates, edits, renames and deletes files in the memory directory.",
        _object(
            ("command",),
            command=_MEMORY,
            **_EDITED,
            old_path=_STRING,
            new_path=_STRING,
        ),
    ),
    "computer_": (
        "Uses the mouse and the keyboard, and takes screenshots.",
        _object(
            ("action",),
            action=_STRING,
            coordinate=_RANGE,
            start_coordinate=_RANGE,
            text=_STRING,
            duration={"type": "number"},
            scroll_direction={"enum": ["up", "down", "left", "right"]},
            scroll_amount=_INTEGER,
        ),
    ),
}
"""Description and schema of each of Anthropic's client tools, by the beginning of its type."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request, sorted by who runs them."""

    functions: tuple[dict[str, Any], ...]
    """OpenAI's function objects of the tools that the client runs."""
    here: tuple[tuple[int, str], ...]
    """Places and names of the registered tools that the cluster runs."""
    places: tuple[int, ...]
    """The place of each function in the request's tools."""
    left_out: tuple[str, ...]
    """Types of the tools that nobody here can run."""


def offered(tools: Sequence[Tool]) -> Offered:
    """Sort the tools of a request.

    Raises:
        BadRequest: a tool has no valid name or schema, or two tools have one name.
    """
    functions: list[dict[str, Any]] = []
    here: list[tuple[int, str]] = []
    places: list[int] = []
    left_out: list[str] = []
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        path = f"tools.{place}"
        if tool.type == TOOLSET:
            continue
        if tool.type is not None and tool.type.startswith(HOSTED):
            if _TYPE.fullmatch(tool.type) is None:
                raise _bad(f"{path}.type", "a type has 1 to 64 lower-case letters, digits and underscores")
            left_out.append(tool.type)
            continue
        name = _name(tool, path)
        if name in seen:
            raise _bad(f"{path}.name", f"there are two tools of the name {name!r}")
        seen.add(name)
        if tool.server_side:
            here.append((place, name))
        else:
            functions.append(_function(tool, name, path))
            places.append(place)
    return Offered(tuple(functions), tuple(here), tuple(places), tuple(left_out))


def shown_as(name: str, offer: ToolOffer | None) -> tuple[str, str]:
    """Return the `server_name` and the `name` of a block for the call of a tool.

    The name by which the model calls the tool can be made of both (`conversation.called_as`), because the conversation
    has to be the same when the client sends it again.

    Args:
        name: the name by which the model has called it.
        offer: the tool; None: there is no such tool.
    """
    if offer is None or offer.server_tool is None or offer.label == CLUSTER_SERVER:
        return CLUSTER_SERVER, name
    return offer.label, offer.server_tool


def chat_choice(choice: ToolChoice, names: Sequence[str], param: str = "tool_choice") -> Any:
    """Return chat completions' `tool_choice`.

    Args:
        choice: the request's choice.
        names: names of the tools that are offered.
        param: the path of the choice in the request.

    Raises:
        BadRequest: the named tool is not offered, or a call is required and no tool is offered.
    """
    if choice.type == "tool":
        if choice.name is None:
            raise _bad(f"{param}.name", "Field required")
        if choice.name not in names:
            raise _bad(f"{param}.name", f"no tool {choice.name[:200]!r} is offered")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "any":
        if not names:
            raise _bad(param, "there is no tool that could be called")
        return "required"
    return choice.type


def _name(tool: Tool, path: str) -> str:
    if tool.name is None:
        raise _bad(f"{path}.name", "Field required")
    if NAME.fullmatch(tool.name) is None:
        raise _bad(f"{path}.name", "must have 1 to 128 letters, digits, '_' or '-'")
    return tool.name


def _function(tool: Tool, name: str, path: str) -> dict[str, Any]:
    if tool.type is None or tool.type == "custom":
        if tool.input_schema is None:
            raise _bad(f"{path}.input_schema", "Field required")
        if tool.input_schema.get("type") != "object":
            raise _bad(f"{path}.input_schema.type", "must be 'object'")
        return function_object(name, tool.description, tool.input_schema, strict=tool.strict)
    known = next((value for begin, value in CLIENT_TOOLS.items() if tool.type.startswith(begin)), None)
    if known is None:
        raise _bad(f"{path}.type", f"the tool type {tool.type[:200]!r} is unknown")
    return function_object(name, known[0], known[1])


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
