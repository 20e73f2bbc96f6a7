"""Checks the tools of a chat completions body: their names, that arguments are an object, and which may be called."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.core.errors import BadRequest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""A superset of what OpenAI and Anthropic accept. A name with quotes or spaces would break formats of calls."""

OBJECT = "object"


CHOICES = ("function", "custom", "allowed_tools")
"""Types of a tool choice that is an object."""


def with_checked_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completions body with checked tools. `allowed_tools` leaves only these, and its mode is the choice.

    Raises:
        BadRequest: see `checked_tools`; or the choice has another type, or names a tool that is not among the tools.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return dict(body)
    checked, choice = checked_tools(tools), body.get("tool_choice")
    if not isinstance(choice, dict):
        return {**body, "tools": checked}
    if choice.get("type") not in CHOICES:
        known = ", ".join(CHOICES)
        raise BadRequest(
            f"tool_choice.type: must be one of {known}; 'auto', 'none' and 'required' are strings",
            param="tool_choice.type",
        )
    if choice["type"] != "allowed_tools":
        return {**body, "tools": checked}
    # OpenAI's chat completions have the fields in an object of that name, and its responses beside the type.
    path = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
    mode, names = _allowed(choice.get("allowed_tools", choice), path)
    offered = {name: tool for tool in checked if (name := _name_of(tool)) is not None}
    for place, name in enumerate(names):
        if name not in offered:
            where = f"{path}.tools.{place}.function.name"
            raise BadRequest(f"{where}: {name!r} is not among the tools", param=where)
    allowed = frozenset(names)
    return {**body, "tools": [offered[name] for name in offered if name in allowed], "tool_choice": mode}


def _allowed(allowed: Any, path: str) -> tuple[str, list[str]]:
    """Return the mode and the names of allowed tools."""
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required"):
        raise BadRequest(f"{path}.mode: must be 'auto' or 'required'", param=f"{path}.mode")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise BadRequest(f"{path}.tools: must be a list of at least one tool", param=f"{path}.tools")
    names: list[str] = []
    for place, tool in enumerate(tools):
        name = _name_of(tool) or (tool.get("name") if isinstance(tool, dict) else None)
        if not isinstance(name, str):
            where = f"{path}.tools.{place}.function.name"
            raise BadRequest(f"{where}: must be the name of a tool", param=where)
        names.append(name)
    return mode, names


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def checked_tools(tools: Sequence[Any]) -> list[Any]:
    """Return the tools, each with parameters that are an object. A tool without parameters gets an empty object.

    Items that are not a tool of a function are returned as they are; the replica rejects them by their field.

    Raises:
        BadRequest: a name is not valid or occurs twice, or parameters are of another type. ``param`` names the field.
    """
    names: set[str] = set()
    checked = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict):
            path = f"tools.{place}.function"
            _check_name(function.get("name"), f"{path}.name", names)
            tool = {**tool, "function": _with_object(function, f"{path}.parameters")}
        checked.append(tool)
    return checked


def _check_name(name: Any, path: str, names: set[str]) -> None:
    if not isinstance(name, str):
        return
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{path}: must have 1 to 128 letters, digits, '_', '-' or '.'", param=path)
    if name in names:
        raise BadRequest(f"{path}: there are two tools of the name {name!r}", param=path)
    names.add(name)


def _with_object(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    parameters = function.get("parameters")
    if not parameters:
        if parameters not in (None, {}):
            return dict(function)
        return {**function, "parameters": {"type": OBJECT, "properties": {}}}
    if not isinstance(parameters, dict):
        return dict(function)
    kind = parameters.get("type")
    if kind is None and "properties" in parameters:
        return {**function, "parameters": {"type": OBJECT, **parameters}}
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and OBJECT not in kinds:
        raise BadRequest(
            f"{path}.type: arguments are an object, so that the type must be 'object'", param=f"{path}.type"
        )
    return dict(function)
