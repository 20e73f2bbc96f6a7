"""Custom resources against the CustomResourceDefinitions of their projects, in a folder that the caller has.

They are not part of this repository. Run `python -m tests.deploy.chart --crds FOLDER` whenever the shapes of `crds/`
change.
Rules in CEL (`x-kubernetes-validations`) are not evaluated.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator


def definition_problems(document: dict[str, Any], folder: Path) -> list[str]:
    """What is wrong with an object by the definition of its kind; nothing, if the folder has none."""
    validator = _definitions(folder).get((document["apiVersion"], document["kind"]))
    if validator is None:
        return []
    place = f"{document['kind']} {document['metadata']['name']}"
    return [f"{place}: {error.json_path}: {error.message[:200]}" for error in validator.iter_errors(document)]


@cache
def _definitions(folder: Path) -> dict[tuple[str, str], Draft7Validator]:
    """By apiVersion and kind."""
    found = {}
    for path in sorted(folder.glob("*.y*ml")):
        for definition in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = _closed(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {}
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = Draft7Validator(schema)
    return found


def _closed(schema: Any) -> Any:
    """As JSON schema. An API server drops unknown fields; here they are refused."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if closed.pop("x-kubernetes-int-or-string", False) is True:
        closed.pop("type", None)
    open_ended = closed.pop("x-kubernetes-preserve-unknown-fields", False) is True
    is_object = closed.get("type") == "object" and isinstance(closed.get("properties"), dict)
    if is_object and not open_ended and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed
