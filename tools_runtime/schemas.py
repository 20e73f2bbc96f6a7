"""Checks arguments against a JSON Schema, in bounded time for any schema and any arguments.

A schema is checked once, when its tool is made: its size, depth and references are bounded, references stay within the
schema and form no circle, and patterns have linear time (Rust's regex: no look-around, no back-references). A check of
arguments costs at most about (keywords of the schema, references expanded) · (values of the arguments). This product is
bounded too.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jsonschema_rs
from pydantic_core import from_json

from cluster.core.errors import ToolRefused

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_EXPANDED_VALUES = 5_000
"""Largest number of values of a schema, with each reference expanded."""
MAX_WORK = 400_000
"""Largest product of the values of a schema and the values of the arguments."""
MAX_REFERENCES = 256
MAX_ARGUMENT_DEPTH = 64
MAX_COMPLAINTS = 5
MAX_COMPLAINT_LENGTH = 300

DIALECTS = ("http://json-schema.org/", "https://json-schema.org/")
"""Prefixes of the known dialects. A schema that names another dialect is read as 2020-12."""

_FORBIDDEN = ("$dynamicRef", "$recursiveRef", "$id", "$dynamicAnchor")
_UNBOUNDED = ("unevaluatedProperties", "unevaluatedItems")
"""Keywords that are not supported, because their check repeats that of their neighbours at each level. This takes time
exponential in the depth."""


NESTED_TOO_DEEPLY = "a schema whose references are nested too deeply"


class RecursiveSchema(ValueError):
    """A schema has a reference that leads back to a schema that contains it."""


class ArgumentCheck:
    """Checks the arguments of one tool.

    Args:
        schema: JSON Schema of an object.
        note: text that is added to every error message.

    Raises:
        RecursiveSchema: the schema is circular; see `tools_runtime.recursive_schemas`.
        ValueError: the schema is not valid, too large, too deep, or refers to another document.
    """

    def __init__(self, schema: Mapping[str, Any], note: str = "") -> None:
        self._note = note
        # The keywords that name a document or a dialect say nothing of the arguments.
        self.schema = {key: value for key, value in schema.items() if key not in ("$id", "$vocabulary")}
        self._values = _admitted(self.schema)
        if self.schema.get("type", "object") != "object":
            raise ValueError("a tool's parameters must be of type object")
        known = str(self.schema.get("$schema", "")).startswith(DIALECTS)
        judged = self.schema if known else {key: value for key, value in self.schema.items() if key != "$schema"}
        try:
            self._validator = jsonschema_rs.validator_for(
                judged, pattern_options=jsonschema_rs.RegexOptions(), offline=True
            )
        except jsonschema_rs.ValidationError as error:
            raise ValueError(f"not a JSON Schema: {_at(error)}") from None

    def checked(self, arguments: str | Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
        """Return the arguments as an object that the schema allows.

        Raises:
            ToolRefused: the schema does not allow them. The message has the faults and their places, for the model to
                read.
        """
        value = _parsed(arguments, max_bytes)
        work = self._values * _count(value)
        if work > MAX_WORK:
            raise ToolRefused(f"the arguments have too many values for this tool's schema ({work} > {MAX_WORK})")
        complaints = [_at(error) for error in islice(self._validator.iter_errors(value), MAX_COMPLAINTS)]
        if complaints:
            raise ToolRefused(f"wrong arguments: {'; '.join(complaints)}{self._note}")
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArgumentCheck) and self.schema == other.schema

    __hash__ = None  # type: ignore[assignment]


def _parsed(arguments: str | Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
        size = len(text.encode())
        if size > max_bytes:
            raise ToolRefused(f"the arguments have {size} bytes; at most {max_bytes} are taken")
        if not text.strip():  # a call whose arguments were never written is no call without arguments
            raise ToolRefused("there are no arguments; a call without arguments has an empty object, {}")
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolRefused(f"the arguments are not JSON: {str(error)[:MAX_COMPLAINT_LENGTH]}") from None
    if not isinstance(value, dict):
        raise ToolRefused("the arguments are not a JSON object")
    if _depth(value, MAX_ARGUMENT_DEPTH) > MAX_ARGUMENT_DEPTH:
        raise ToolRefused(f"the arguments are nested deeper than {MAX_ARGUMENT_DEPTH}")
    return value


def _admitted(schema: Mapping[str, Any]) -> int:
    """Return the number of values in ``schema``, with references expanded.

    Raises:
        ValueError: the schema is not supported, too large or too deep.
    """
    if _depth(schema, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise ValueError(f"a schema nested deeper than {MAX_SCHEMA_DEPTH}")
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a schema that is not JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of {size} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    references = 0
    for part in _parts(schema):
        unsupported = [key for key in _FORBIDDEN if isinstance(part.get(key), str)]
        unsupported += [key for key in _UNBOUNDED if key in part]
        if unsupported:
            raise ValueError(f"a schema with {unsupported[0]}, which is not supported")
        references += isinstance(part.get("$ref"), str)
    if references > MAX_REFERENCES:
        raise ValueError(f"a schema with {references} references; at most {MAX_REFERENCES} are taken")
    try:
        return _Expansion(schema).values(schema)
    except RecursionError:
        raise ValueError(NESTED_TOO_DEEPLY) from None


class _Expansion:
    """Counts the values of an expanded schema.

    It is memoised, so that nested references cost no more than their text.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._targets: dict[str, int] = {}
        self._open: set[str] = set()

    def values(self, part: Any) -> int:
        if isinstance(part, list):
            total = 1 + sum(self.values(item) for item in part)
        elif isinstance(part, dict):
            # The target of a $ref is counted at the $ref; definitions count only where they are used.
            named = ((key, item) for key, item in part.items() if key not in ("$defs", "definitions"))
            total = 1 + sum(
                self._target(item) if key == "$ref" and isinstance(item, str) else self.values(item)
                for key, item in named
            )
        else:
            return 1
        if total > MAX_EXPANDED_VALUES:
            raise ValueError(f"a schema that amounts to more than {MAX_EXPANDED_VALUES} values")
        return total

    def _target(self, reference: str) -> int:
        if reference in self._open:
            raise RecursiveSchema(f"a schema with a circular reference: {reference[:100]}")
        if reference not in self._targets:
            self._open.add(reference)
            self._targets[reference] = self.values(resolved(self._root, reference))
            self._open.remove(reference)
        return self._targets[reference]


def resolved(document: Any, reference: str) -> Any:
    """Return the part of a document to which a reference leads.

    Raises:
        ValueError: it leads to another document, or nowhere.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"a reference to another document, or to an anchor: {reference[:100]}")
    here = document
    for step in reference[2:].split("/") if len(reference) > 2 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and step in here:
            here = here[step]
        elif isinstance(here, list) and step.isdecimal() and int(step) < len(here):
            here = here[int(step)]
        else:
            raise ValueError(f"a reference that leads nowhere: {reference[:100]}")
    return here


def _at(error: jsonschema_rs.ValidationError) -> str:
    path = ".".join(str(step) for step in error.instance_path)
    text = f"{path}: {error.message}" if path else error.message
    half = MAX_COMPLAINT_LENGTH // 2  # the fault is at the end, after a value that may be long
    return text if len(text) <= MAX_COMPLAINT_LENGTH else f"{text[:half]}...{text[-half:]}"


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    stack = [value]
    while stack:
        here = stack.pop()
        if isinstance(here, dict):
            yield here
            stack.extend(here.values())
        elif isinstance(here, list):
            stack.extend(here)


def _count(value: Any) -> int:
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        raise ToolRefused("the arguments are not JSON: a number is too large")
    return 1 + sum(_count(item) for item in _items(value))


def _depth(value: Any, limit: int) -> int:
    """Return how deep ``value`` is nested, or ``limit`` + 1 where it is deeper."""
    depth, level = 0, [value]
    while level and depth <= limit:
        level = [item for here in level for item in _items(here)]
        depth += 1
    return depth


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
