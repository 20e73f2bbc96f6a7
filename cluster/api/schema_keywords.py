"""Rejects JSON Schemas that no output can satisfy, and strict schemas with keywords that the grammar does not enforce.

vLLM accepts both. The engine finds no first token for the first kind, so that the request fails after its stream
has begun. Of the second kind, the grammar backend (xgrammar) ignores the keyword, and the output may violate it.
`tests/contracts/test_schema_keywords.py` compares the keywords with the pinned backend.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.core.errors import BadRequest

UNSATISFIABLE, UNSUPPORTED = "unsatisfiable_schema", "unsupported_schema_keyword"

IGNORED = frozenset((
    "if", "then", "else", "not", "dependentSchemas", "dependentRequired", "unevaluatedProperties",
    "unevaluatedItems", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "$dynamicRef",
    "$recursiveRef", "dependencies",
))  # fmt: skip
"""Keywords that restrict a value, and that the grammar does not enforce."""
ASSERTIONS = frozenset((
    "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    "items", "prefixItems", "minItems", "maxItems", "pattern", "format", "minLength", "maxLength", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "anyOf", "oneOf", "allOf",
))  # fmt: skip
"""Keywords that restrict a value, and that the grammar ignores beside a `$ref`, an `anyOf` or a `oneOf`."""
LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_ONE = ("items", "additionalProperties")
_OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")

Path = tuple[str, ...]


def check_schema(param: str, schema: Any, strict: bool) -> None:
    """Check the schema of one output.

    Args:
        param: name of the schema's field in the request, such as ``response_format.json_schema.schema``.
        schema: the schema. One that is not an object is left to vLLM, which rejects it.
        strict: whether the output must match every keyword.

    Raises:
        BadRequest: no output can match the schema, or a keyword of a strict schema is not enforced (400). `param`
            names the keyword's place.
    """
    if not isinstance(schema, Mapping):
        return
    nodes = dict(_nodes(schema))
    for path, node in nodes.items():
        if isinstance(node, Mapping):
            _check_reference(param, path, node, schema, strict)
            if strict:
                _check_keywords(param, path, node)
    if not _is_satisfiable(schema, nodes):
        message = f"{param}: no finite value matches the schema, because it requires itself or an impossible value"
        raise BadRequest(message, param=param, code=UNSATISFIABLE)


def _nodes(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schema and the schemas in it, each with its path."""
    left: list[tuple[Path, Any]] = [((), schema)]
    while left:
        path, node = left.pop()
        yield path, node
        if not isinstance(node, Mapping):
            continue
        for key in _OF_NAMES:
            if isinstance(node.get(key), Mapping):
                left += [((*path, key, str(name)), part) for name, part in node[key].items()]
        left += [((*path, key), node[key]) for key in _OF_ONE if key in node]
        for key in _OF_MANY:
            if isinstance(node.get(key), list):
                left += [((*path, key, str(number)), part) for number, part in enumerate(node[key])]


def _check_reference(param: str, path: Path, node: Mapping[str, Any], schema: Any, strict: bool) -> None:
    reference = node.get("$ref")
    # The grammar takes any value for a reference of another form.
    if isinstance(reference, str) and _target(schema, reference) is None and (strict or reference.startswith("#/")):
        where = ".".join((param, *path, "$ref"))
        message = f"{where}: {reference[:200]!r} is not a schema in this one; references begin with '#'"
        raise BadRequest(message, param=where, code=UNSUPPORTED)


def _check_keywords(param: str, path: Path, node: Mapping[str, Any]) -> None:
    for keyword, problem in _unenforced(node):
        where = ".".join((param, *path, keyword))
        message = f"{where}: {problem}, and the schema is strict"
        raise BadRequest(message, param=where, code=UNSUPPORTED)


def _unenforced(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for keyword in sorted(IGNORED & node.keys()):
        yield keyword, "is not enforced"
    every = node.get("allOf")
    if isinstance(every, list) and (len(every) > 1 or ASSERTIONS & node.keys() != {"allOf"}):
        yield "allOf", "is only enforced with one schema and without other keywords"
    for keyword in ("$ref", "anyOf", "oneOf"):
        if keyword in node and (beside := ASSERTIONS & node.keys() - {keyword}):
            yield keyword, f"is not enforced together with {sorted(beside)[0]}"
    pattern = node.get("pattern")
    if isinstance(pattern, str) and LOOKAROUND.search(pattern):
        yield "pattern", "look-around is not enforced"


def _target(schema: Any, reference: str) -> Path | None:
    """Return the path of a reference's target. None: it is not in this schema."""
    if reference == "#":
        return ()
    if not reference.startswith("#/"):
        return None
    here, path = schema, []
    for step in reference[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, Mapping) and key in here:
            here = here[key]
        elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here = here[int(key)]
        else:
            return None
        path.append(key)
    return tuple(path)


def _is_satisfiable(schema: Any, nodes: Mapping[Path, Any]) -> bool:
    """Return whether the schema has a finite value: the least fixed point over its nodes, in linear time.

    Only what is surely impossible counts as such. Everything that is not understood is satisfiable.
    """
    known: set[Path] = set()
    waiting: defaultdict[Path, list[tuple[Path, Iterator[Path]]]] = defaultdict(list)

    def learn(path: Path, left: Iterator[Path]) -> None:
        stack = [(path, left)]
        while stack:
            path, left = stack.pop()
            blocking = next((part for part in left if part not in known), None)
            if blocking is not None:
                waiting[blocking].append((path, left))
            elif path not in known:
                known.add(path)
                stack += waiting.pop(path, [])

    for path, node in reversed(list(nodes.items())):
        needs_all, parts = _needed(schema, nodes, path, node)
        if needs_all or any(part in known for part in parts):
            learn(path, iter(parts if needs_all else ()))
        else:
            for part in parts:
                waiting[part].append((path, iter(())))
    return () in known


def _needed(schema: Any, nodes: Mapping[Path, Any], path: Path, node: Any) -> tuple[bool, list[Path]]:
    """Return the nodes that must be satisfiable for this one to be, and whether all of them must be or only one."""
    if not isinstance(node, Mapping):
        return node is not False, []
    if isinstance(node.get("$ref"), str):
        target = _target(schema, node["$ref"])
        # A reference may lead to a place where no schema is expected, which is left to vLLM.
        return True, [target] if target is not None and target in nodes else []
    for key, needs_all in (("anyOf", False), ("oneOf", False), ("allOf", True)):
        if isinstance(node.get(key), list) and node[key]:
            return needs_all, [(*path, key, str(number)) for number in range(len(node[key]))]
    kind, properties, required = node.get("type"), node.get("properties"), node.get("required")
    if kind == "object" or (kind is None and properties is not None):
        if isinstance(properties, Mapping) and isinstance(required, list):
            named = [name for name in required if isinstance(name, str) and name in properties]
            return True, [(*path, "properties", name) for name in named]
    elif kind == "array" and isinstance(node.get("minItems"), int) and node["minItems"] > 0 and "items" in node:
        return True, [] if "prefixItems" in node else [(*path, "items")]
    return True, []
