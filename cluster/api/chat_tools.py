"""Checks the tools of a chat completions body: their names, and that arguments are an object."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.core.errors import BadRequest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""A superset of what OpenAI and Anthropic accept. A name with quotes or spaces would break formats of calls."""

OBJECT = "object"


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
