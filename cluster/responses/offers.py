"""A request's tools as offers to the model, its MCP servers as definitions for the tool runtime, and tool choices."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.core.errors import BadRequest
from cluster.core.tools import ToolOffer, function_object, is_taken, server_tool_name
from cluster.responses.custom_tools import function_of
from cluster.responses.request import CreateResponse, RequestTool
from cluster.responses.tools import (
    AllowedTools,
    ChosenFunction,
    ChosenMcpTool,
    ChosenOther,
    CustomTool,
    FunctionTool,
    McpTool,
    ToolFilter,
)

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
    for one in request.functions:
        path, tool = one.path, one.tool
        if not isinstance(tool, McpTool):
            continue
        if tool.server_label in definitions:
            raise _bad(f"{path}.server_label", f"another server has the label {tool.server_label!r}")
        if is_taken(tool.server_label, taken):
            raise _bad(f"{path}.server_label", f"{tool.server_label!r} cannot be a label here; choose another")
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
    for one in request.functions:
        for offer in _offered(one, registered, listings):
            if offer.name in made:
                key = "server_label" if isinstance(one.tool, McpTool) else "name"
                raise _bad(f"{one.path}.{key}", f"there are two tools of the name {offer.name!r}")
            made[offer.name] = offer
    if isinstance(request.tool_choice, AllowedTools):
        return tuple(_allowed(request.tool_choice, tuple(made.values())))
    return tuple(made.values())


def _offered(one: RequestTool, registered: Registered, listings: Listing) -> Iterator[ToolOffer]:
    tool = one.tool
    if isinstance(tool, McpTool):
        yield from _of_server(tool, listings, one.path)
    elif isinstance(tool, CustomTool):
        yield ToolOffer(tool.name, function_of(tool), here=False, custom=True, namespace=one.namespace)
    elif not tool.server_side:
        function = function_object(tool.name, tool.description, tool.parameters, strict=tool.strict)
        yield ToolOffer(tool.name, function, here=False, namespace=one.namespace)
    else:
        yield _registered(tool.name, registered, one.path)


def _registered(name: str, registered: Registered, path: str) -> ToolOffer:
    """Return a tool of the configuration.

    Raises:
        BadRequest: it is not there, or nobody can call it.
    """
    known = registered.get(name)
    if known is None:
        names = ", ".join(sorted(name for name, one in registered.items() if one.unusable is None)) or "none"
        raise _bad(f"{path}.name", f"no tool {name!r} is registered; registered are: {names}")
    if known.unusable is not None:
        raise _bad(f"{path}.name", f"the tool {name!r} cannot be used: {known.unusable}")
    return known


def _allowed(choice: AllowedTools, offered: Sequence[ToolOffer]) -> Iterator[ToolOffer]:
    """Yield the tools that a choice allows, in the order of the request.

    Raises:
        BadRequest: an allowed tool is not among the tools.
    """
    allowed: set[str] = set()
    for place, one in enumerate(choice.tools):
        if not isinstance(one, ChosenOther):
            allowed |= {offer.name for offer in _chosen(one, offered, f"tool_choice.tools.{place}")}
    return (offer for offer in offered if offer.name in allowed)


def _of_server(tool: McpTool, listings: Listing, path: str) -> Iterator[ToolOffer]:
    label = tool.server_label
    if label not in listings:
        raise BadRequest(f"{path}: {label!r} does not list its tools", status=FAILED_DEPENDENCY, param=path)
    for listed in listings[label]:
        own = listed.server_tool or listed.name
        if listed.unusable is None and tool.allows(own, listed.read_only):
            approval = tool.needs_approval(own, listed.read_only)
            yield msgspec.structs.replace(listed, approval=approval, server=label)


def unusable(listings: Listing) -> dict[str, str]:
    """Return what is reported of the tools that cannot be called, by their server's label."""
    reports = {
        label: "; ".join(f"{one.server_tool}: {one.unusable}" for one in listed if one.unusable is not None)
        for label, listed in listings.items()
    }
    return {label: f"tools that cannot be used: {report}" for label, report in reports.items() if report}


def chat_choice(choice: Any, offered: Sequence[ToolOffer], param: str) -> Any:
    """Convert a tool choice to that of chat completions. None: the request has none.

    Args:
        choice: the value of `tool_choice`, or one of `tool_choices`.
        offered: the tools that exist.
        param: the field of the choice, for errors.

    Raises:
        BadRequest: there is no such tool.
    """
    if isinstance(choice, ChosenFunction | ChosenMcpTool):
        tools = _chosen(choice, offered, param)
        if len(tools) != 1:
            raise _bad(param, f"name the tool: {len(tools)} are chosen")
        return {"type": "function", "function": {"name": tools[0].name}}
    if isinstance(choice, AllowedTools):
        choice = choice.mode
    if choice == "required" and not offered:
        raise _bad(param, "there is no tool that could be called")
    return choice


def _chosen(choice: ChosenFunction | ChosenMcpTool, offered: Sequence[ToolOffer], param: str) -> list[ToolOffer]:
    """Return the tools that a choice names: one, or all of a server.

    Raises:
        BadRequest: there is none.
    """
    if isinstance(choice, ChosenFunction):
        name = choice.name
        tools = [offer for offer in offered if offer.name == name]
    else:
        name = choice.server_label if choice.name is None else server_tool_name(choice.server_label, choice.name)
        tools = [offer for offer in offered if offer.server == choice.server_label]
        tools = [offer for offer in tools if choice.name in (None, offer.server_tool)]
    if not tools:
        raise _bad(param, f"Tool choice {name!r} not found in 'tools' parameter.")
    return tools


def shown_tools(request: CreateResponse) -> list[dict[str, Any]]:
    """Return the request's tools, as its response repeats them."""
    return [_shown(one.tool) for one in request.functions]


def _shown(tool: FunctionTool | CustomTool | McpTool) -> dict[str, Any]:
    shown = tool.model_dump(mode="json", exclude_unset=True)
    if isinstance(tool, FunctionTool):  # with the fields that OpenAI's server always shows
        return {"description": None, "parameters": None, "strict": None, **shown}
    return {key: value for key, value in shown.items() if key not in SECRET_FIELDS}


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
