"""Makes arguments that a tool's JSON schema accepts, for the calls of the built-in model's tool loop.

Only required properties are given. They run nothing that changes files: shell commands list the working directory.
"""

from collections.abc import Mapping
from typing import Any

COMMANDS = ("ls", "pwd", "ls -a")
"""Shell commands for a string property named `command` or `cmd`, one for each call of a loop: agents stop a loop that
repeats the same call."""

KNOWN = {"command": COMMANDS, "cmd": COMMANDS, "pattern": ("*", "*.md", "*.py")}
"""Values for required string properties of these names, one for each call of a loop."""
PATHS = ("path", "file_path", "filepath", "workdir", "directory")
"""Names of properties that hold a path: the working directory is given."""

DEPTH = 8
"""Maximum nesting of required values. A deeper schema, such as a recursive one, gives an empty object there."""


def arguments_of(schema: Mapping[str, Any], call: int) -> dict[str, Any]:
    """Return arguments with the required properties of ``schema``.

    Args:
        schema: the tool's `parameters`, a JSON schema of an object. `$ref` to its own definitions is followed.
        call: number of the call in its loop, from 0: known properties get another value in each.
    """
    made = _Values(schema, call).value(schema, "", DEPTH)
    return made if isinstance(made, dict) else {}


class _Values:
    def __init__(self, root: Mapping[str, Any], call: int) -> None:
        self._root, self._call = root, call

    def value(self, schema: Any, name: str, depth: int) -> Any:
        schema = self._resolved(schema)
        for key in ("const", "default"):
            if key in schema:
                return schema[key]
        if schema.get("enum"):
            return schema["enum"][0]
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self.value(schema[key][0], name, depth)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                items = schema.get("items", {})
                if name in KNOWN:
                    return self._known(name).split()
                return [self.value(items, "", depth - 1) for _ in range(schema.get("minItems", 0))]
            case "integer" | "number":
                return self._number(schema)
            case "boolean":
                return False
            case "null":
                return None
        return self._string(schema, name)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        if depth == 0:
            return {}
        properties = schema.get("properties", {})
        return {name: self.value(properties.get(name, {}), name, depth - 1) for name in schema.get("required", ())}

    def _string(self, schema: Mapping[str, Any], name: str) -> str:
        text = "." if name.lower() in PATHS else self._known(name)
        return text.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]

    def _known(self, name: str) -> str:
        values = KNOWN.get(name, ("text",))
        return values[self._call % len(values)]

    def _number(self, schema: Mapping[str, Any]) -> int | float:
        low, step = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("multipleOf", 1)
        least: int | float = low + step if "exclusiveMinimum" in schema else low
        high = schema.get("maximum")
        if "minimum" not in schema and "exclusiveMinimum" not in schema and high is not None:
            least = min(0, high)
        return least

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follow references into the schema's own document. Anything else is a schema that accepts everything."""
        for _ in range(DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            schema = self._root
            for part in reference[2:].split("/"):
                schema = schema.get(part, {}) if isinstance(schema, Mapping) else {}
        return schema if isinstance(schema, Mapping) else {}
