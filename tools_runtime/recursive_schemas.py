"""Recursive JSON Schemas without their recursion, so that arguments are checked in bounded time (`ArgumentCheck`).

A reference that leads back to a schema that contains it is replaced by the type of that schema. The result allows
everything that the recursive schema allows: the first level of a tree is checked, and the tool checks the rest.
"""

import json
from collections.abc import Mapping
from typing import Any

from tools_runtime.schemas import NESTED_TOO_DEEPLY, resolved

_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords with schemas by name. The names are no keywords."""
_NO_SCHEMAS = frozenset({"$defs", "definitions", "enum", "const", "default", "examples"})
"""Keywords with values, and those with definitions, which count where they are used."""
_NOTES = ("title", "description")


def without_recursion(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``schema`` in which no reference leads back to a schema that contains it.

    Args:
        schema: JSON Schema of bounded size and depth.

    Raises:
        ValueError: a reference leads nowhere, or to another document, or the references are nested too deeply.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    try:
        _Recursion(copy).cut(copy)
    except RecursionError:
        raise ValueError(NESTED_TOO_DEEPLY) from None
    return copy


class _Recursion:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._open = {"#"}
        self._looser: dict[str, bool] = {}
        """For each target of a reference, whether it allows more now."""
        self._looser_parts: set[int] = set()
        """Identities of the schemas that allow more now. One may be reached again on another way."""

    def cut(self, part: Any) -> bool:
        """Cut the recursion in a schema, or in a list of schemas. Return whether it allows more now."""
        if isinstance(part, list):
            looser_items = [self.cut(item) for item in part]
            return any(looser_items)
        if not isinstance(part, dict):
            return False
        reference = part.get("$ref")
        looser = id(part) in self._looser_parts
        looser |= isinstance(reference, str) and self._follow(part, reference)
        for key in [key for key in part if key not in _NO_SCHEMAS]:
            value = part.get(key)
            inner = list(value.values()) if key in _BY_NAME and isinstance(value, dict) else value
            if self.cut(inner):
                looser = True
                _allow_more(part, key)
        if looser:
            self._looser_parts.add(id(part))
        return looser

    def _follow(self, part: dict[str, Any], reference: str) -> bool:
        target = resolved(self._root, reference)
        if reference in self._open:
            notes = {key: part[key] for key in _NOTES if key in part}
            kind = target.get("type") if isinstance(target, dict) else None
            part.clear()
            part.update({"description": f"As {reference}."} | notes)
            part.update({} if kind is None else {"type": kind})
            return True
        if reference not in self._looser:
            self._open.add(reference)
            self._looser[reference] = self.cut(target)
            self._open.remove(reference)
        return self._looser[reference]


def _allow_more(part: dict[str, Any], key: str) -> None:
    """Change a keyword whose own schema allows more now, if ``part`` would therefore allow less.

    A keyword that leads back to ``part`` has been changed already.
    """
    if key not in part:
        return
    match key:
        case "not":
            del part["not"]
        case "if":
            for name in ("if", "then", "else"):
                part.pop(name, None)
        case "oneOf":
            others = [{"allOf": part["allOf"]}] if "allOf" in part else []
            part["allOf"] = [*others, {"anyOf": part.pop("oneOf")}]
        case "contains":
            part.pop("maxContains", None)
