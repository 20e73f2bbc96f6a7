"""A request's tools as offers to the model, its MCP servers as definitions for the tool runtime, and tool choices."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.config.tools import server_tool_name
from cluster.core.errors import BadRequest
from cluster.core.tools import ToolOffer, function_object
from cluster.responses.request import ChosenFunction, ChosenMcpTool, CreateResponse, FunctionTool, McpTool, ToolFilter

FAILED_DEPENDENCY = 424
"""The HTTP status if an MCP server that the request names does not list its tools."""

SECRET_FIELDS = ("authorization", "headers")

Listing = Mapping[str, Sequence[ToolOffer]]
"""The tools of each MCP server as the tool runtime offers them, by the server's label."""

Registered = Mapping[str, ToolOffer]
"""The operator's tools by name."""


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The MCP servers of a request."""

    definitions: dict[str, dict[str, Any]]
    """Definitions by label, as in the configuration's `tools.defined`, without their secrets."""
    secrets: dict[str, dict[str, Any]]
    """Secret fields of the definitions by label: headers for the server. They are never in a log."""

    def whole(self) -> dict[str, dict[str, Any]]:
        """Return the definitions with their secrets, for calls of the servers."""
        return {label: {**definition, **self.secrets.get(label, {})} for label, definition in self.definitions.items()}


def brought(request: CreateResponse, taken: Collection[str] = ()) -> RequestTools:
    """Return the MCP servers that ``request`` brings.

    Args:
        request: the request.
        taken: names of the operator's own tools and servers.

    Raises:
        BadRequest: two servers have the same label, or a label is in ``taken``.
    """
    definitions: dict[str, dict[str, Any]] = {}
    secrets: dict[str, dict[str, Any]] = {}
    for path, tool in request.functions:
        if not isinstance(tool, McpTool):
            continue
        if tool.server_label in definitions:
            raise _bad(f"{path}.server_label", f"another server has the label {tool.server_label!r}")
        if tool.server_label in taken:
            raise _bad(f"{path}.server_label", f"a tool of this cluster has the name {tool.server_label!r}")
        definition: dict[str, Any] = {"kind": "mcp", "url": tool.server_url}
        names = tool.allowed_tools.tool_names if isinstance(tool.allowed_tools, ToolFilter) else tool.allowed_tools
        if names is not None:
            definition["allowed_tools"] = names
        definitions[tool.server_label] = definition
        headers = dict(tool.headers or {})
        if tool.authorization is not None:
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            headers["Authorization"] = f"Bearer {tool.authorization}"
        if headers:
            secrets[tool.server_label] = {"headers": headers}
    return RequestTools(definitions, secrets)


def offers(request: CreateResponse, registered: Registered, listings: Listing) -> tuple[ToolOffer, ...]:
    """Return the tools that the model may call.

    Args:
        request: the request.
        registered: the operator's tools by name.
        listings: the listings of the MCP servers that the request brings.

    Raises:
        BadRequest: a registered tool is unknown, two tools have one name, or a server has no listing (status 424).
    """
    made: dict[str, ToolOffer] = {}
    for path, tool in request.functions:
        if isinstance(tool, FunctionTool):
            new: Iterator[ToolOffer] = iter((_function(tool, registered, path),))
        else:
            new = _of_server(tool, listings, path)
        for offer in new:
            if offer.name in made:
                key = "name" if isinstance(tool, FunctionTool) else "server_label"
                raise _bad(f"{path}.{key}", f"there are two tools of the name {offer.name!r}")
            made[offer.name] = offer
    return tuple(made.values())


def _function(tool: FunctionTool, registered: Registered, path: str) -> ToolOffer:
    if not tool.server_side:
        function = function_object(tool.name, tool.description, tool.parameters, strict=tool.strict)
        return ToolOffer(tool.name, function, here=False)
    known = registered.get(tool.name)
    if known is None:
        names = ", ".join(sorted(registered)) or "none"
        raise _bad(f"{path}.name", f"no tool {tool.name!r} is registered; registered are: {names}")
    return known


def _of_server(tool: McpTool, listings: Listing, path: str) -> Iterator[ToolOffer]:
    label = tool.server_label
    if label not in listings:
        raise BadRequest(f"{path}: {label!r} does not list its tools", status=FAILED_DEPENDENCY, param=path)
    for listed in listings[label]:
        own = listed.server_tool or listed.name
        if tool.allows(own, listed.read_only):
            approval = tool.needs_approval(own, listed.read_only)
            yield msgspec.structs.replace(listed, approval=approval, server=label)


def chat_choice(choice: Any, offered: Sequence[ToolOffer], param: str) -> Any:
    """Convert a tool choice to that of chat completions. None: the request has none.

    Args:
        choice: the value of `tool_choice`, or one of `tool_choices`.
        offered: the tools that exist.
        param: the field of the choice, for errors.

    Raises:
        BadRequest: there is no such tool.
    """
    if isinstance(choice, ChosenFunction):
        return _named(choice.name, offered, param)
    if isinstance(choice, ChosenMcpTool):
        tools = [offer for offer in offered if offer.server == choice.server_label]
        if choice.name is not None:
            tools = [offer for offer in tools if offer.server_tool == choice.name]
            if not tools:
                raise _missing(server_tool_name(choice.server_label, choice.name), param)
        if len(tools) != 1:
            raise _bad(param, f"name the tool: the server {choice.server_label!r} has {len(tools)}")
        return _named(tools[0].name, offered, param)
    if choice == "required" and not offered:
        raise _bad(param, "there is no tool that could be called")
    return choice


def _named(name: str, offered: Sequence[ToolOffer], param: str) -> dict[str, Any]:
    if all(offer.name != name for offer in offered):
        raise _missing(name, param)
    return {"type": "function", "function": {"name": name}}


def _missing(name: str, param: str) -> BadRequest:
    return _bad(param, f"Tool choice {name!r} not found in 'tools' parameter.")


def shown_tools(request: CreateResponse) -> list[dict[str, Any]]:
    """Return the request's tools, as its response repeats them."""
    return [_shown(tool) for _, tool in request.functions]


def _shown(tool: FunctionTool | McpTool) -> dict[str, Any]:
    shown = tool.model_dump(mode="json", exclude_unset=True)
    if isinstance(tool, FunctionTool):  # with the fields that OpenAI's server always shows
        return {"description": None, "parameters": None, "strict": None, **shown}
    return {key: value for key, value in shown.items() if key not in SECRET_FIELDS}


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
