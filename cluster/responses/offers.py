"""A request's tools as offers to the model, its MCP servers as definitions for the tool runtime, and its choice."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import BadRequest
from cluster.responses.request import ChosenFunction, ChosenMcpTool, CreateResponse, FunctionTool, McpTool, ToolFilter
from cluster.run_events import Offer
from cluster.tool_config import SEPARATOR

FAILED_DEPENDENCY = 424
"""The HTTP status where an MCP server that the request names does not list its tools."""

SECRET_FIELDS = ("authorization", "headers")

_UNFIT = re.compile(r"[^A-Za-z0-9_-]")

Listing = Mapping[str, Sequence[Mapping[str, Any]]]
"""By label of an MCP server, its tools as the tool runtime lists them: name (`LABEL__TOOL`, or the server's own),
description, parameters; and where it is known, read_only."""


@dataclass(frozen=True, slots=True)
class Brought:
    """The MCP servers of a request."""

    definitions: dict[str, dict[str, Any]]
    """By label, as in the configuration's `tools.defined`; without what is secret."""
    secrets: dict[str, dict[str, Any]]
    """By label, the fields of the definition that are secret: headers for the server. Never in a log."""

    def whole(self) -> dict[str, dict[str, Any]]:
        """The definitions with their secrets, for whoever calls the servers."""
        return {label: {**definition, **self.secrets.get(label, {})} for label, definition in self.definitions.items()}


def brought(request: CreateResponse) -> Brought:
    """The MCP servers that ``request`` brings.

    Raises:
        BadRequest: two have the same label.
    """
    definitions: dict[str, dict[str, Any]] = {}
    secrets: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(request.tools or ()):
        if not isinstance(tool, McpTool):
            continue
        if tool.server_label in definitions:
            raise _bad(f"tools.{place}.server_label", f"another server has the label {tool.server_label!r}")
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
    return Brought(definitions, secrets)


def offers(
    request: CreateResponse, registered: Mapping[str, Mapping[str, Any]], listings: Listing
) -> tuple[Offer, ...]:
    """What the model may call.

    Args:
        request: the request.
        registered: the operator's tools by name: name, description, parameters.
        listings: of each MCP server that the request brings.

    Raises:
        BadRequest: an unknown registered tool, two tools of one name, or 424: a server without a listing.
    """
    made: dict[str, Offer] = {}
    for place, tool in enumerate(request.tools or ()):
        if isinstance(tool, FunctionTool):
            new: Iterator[Offer] = iter((_function(tool, registered, place),))
        else:
            new = _of_server(tool, listings, place)
        for offer in new:
            if offer.name in made:
                key = "name" if isinstance(tool, FunctionTool) else "server_label"
                raise _bad(f"tools.{place}.{key}", f"there are two tools of the name {offer.name!r}")
            made[offer.name] = offer
    return tuple(made.values())


def _function(tool: FunctionTool, registered: Mapping[str, Mapping[str, Any]], place: int) -> Offer:
    if not tool.server_side:
        return Offer(tool.name, _described(tool.name, tool.description, tool.parameters, tool.strict), here=False)
    known = registered.get(tool.name)
    if known is None:
        names = ", ".join(sorted(registered)) or "none"
        raise _bad(f"tools.{place}.name", f"no tool {tool.name!r} is registered; registered are: {names}")
    return Offer(tool.name, _described(tool.name, known.get("description"), known.get("parameters")), here=True)


def _of_server(tool: McpTool, listings: Listing, place: int) -> Iterator[Offer]:
    label = tool.server_label
    if label not in listings:
        param = f"tools.{place}"
        raise BadRequest(f"{param}: {label!r} does not list its tools", status=FAILED_DEPENDENCY, param=param)
    for listed in listings[label]:
        own = str(listed["name"]).removeprefix(label + SEPARATOR)
        read_only = bool(listed.get("read_only", False))
        if not tool.allows(own, read_only):
            continue
        name = called(label, own)
        function = _described(name, listed.get("description"), listed.get("parameters"))
        approval = tool.needs_approval(own, read_only)
        yield Offer(name, function, here=True, approval=approval, server=label, server_tool=own)


def called(label: str, tool: str) -> str:
    """What the model calls a server's tool."""
    return f"{label}{SEPARATOR}{_UNFIT.sub('_', tool)}"


def _described(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = dict(parameters) if parameters is not None else {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    return function


def chat_choice(choice: Any, offered: Sequence[Offer], param: str) -> Any:
    """A choice of the request's as chat completions have it; None: not said.

    Args:
        choice: of `tool_choice`, or one of `tool_choices`.
        offered: the tools that there are.
        param: where the choice stands.

    Raises:
        BadRequest: there is no such tool.
    """
    if isinstance(choice, ChosenFunction):
        return _named(choice.name, offered, param)
    if isinstance(choice, ChosenMcpTool):
        names = [offer.name for offer in offered if offer.server == choice.server_label]
        if choice.name is not None:
            return _named(called(choice.server_label, choice.name), offered, param)
        if len(names) != 1:
            raise _bad(param, f"name the tool: the server {choice.server_label!r} has {len(names)}")
        return _named(names[0], offered, param)
    if choice == "required" and not offered:
        raise _bad(param, "there is no tool that could be called")
    return choice


def _named(name: str, offered: Sequence[Offer], param: str) -> dict[str, Any]:
    if all(offer.name != name for offer in offered):
        raise _bad(param, f"Tool choice {name!r} not found in 'tools' parameter.")
    return {"type": "function", "function": {"name": name}}


def shown_tools(request: CreateResponse) -> list[dict[str, Any]]:
    """The request's tools, as its response repeats them."""
    dumped = (tool.model_dump(mode="json", exclude_unset=True) for tool in request.tools or ())
    return [{key: value for key, value in tool.items() if key not in SECRET_FIELDS} for tool in dumped]


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
