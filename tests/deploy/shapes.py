"""What a custom resource may say, by the shapes in `crds/`; the README there tells the notation."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft7Validator

CRDS = Path(__file__).parent / "crds"
KUBERNETES = "1.29"

WORDS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "any": {},
    "texts": {"type": "object", "additionalProperties": {"type": "string"}},
    "port": {"type": ["string", "integer"]},
    "duration": {"type": "string", "pattern": r"^([0-9]+(ms|y|w|d|h|m|s))+$"},
    "pod": {"type": "object"},
    "service": {"type": "object"},
}


def problems(document: dict[str, Any], kubernetes: str = KUBERNETES) -> list[str]:
    """What is wrong with a rendered object: a custom resource by its shape, anything else by Kubernetes' own schema."""
    kind = document["kind"]
    if kind not in shapes():
        return core_problems(document, kubernetes)
    found = [
        f"{kind}: {error.json_path}: {error.message}"
        for error in Draft7Validator(schema_of(shapes()[kind])).iter_errors(document["spec"])
    ]
    for template in embedded(shapes()[kind], document["spec"], "pod"):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", **template["metadata"]},
            "spec": template["spec"],
        }
        found += core_problems(pod, kubernetes)
    for service in embedded(shapes()[kind], document["spec"], "service"):
        found += core_problems({"apiVersion": "v1", "kind": "Service", **service}, kubernetes)
    return found


def core_problems(document: dict[str, Any], kubernetes: str = KUBERNETES) -> list[str]:
    """By Kubernetes' own schema of this version, strictly."""
    return list(_core_problems(json.dumps(document), ".".join(kubernetes.split(".")[:2])))


@cache  # A chart's renderings have most objects in common.
def _core_problems(text: str, kubernetes: str) -> tuple[str, ...]:
    document = json.loads(text)
    try:
        kubernetes_validate.validate(document, kubernetes, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (f"{document['kind']} {document['metadata'].get('name')}: {list(error.path)}: {error.message}",)
    return ()


@cache
def shapes() -> dict[str, Any]:
    """By kind."""
    found: dict[str, Any] = {}
    for path in sorted(CRDS.glob("*.yaml")):
        found |= yaml.safe_load(path.read_text())
    return found


def schema_of(shape: Any) -> dict[str, Any]:
    """The JSON schema that a shape stands for."""
    if shape is None:  # YAML's name of a word that we never write alone
        raise ValueError("an empty shape")
    if isinstance(shape, list):
        return {"type": "array", "items": schema_of(shape[0])}
    if isinstance(shape, dict):
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [name[:-1] for name in shape if name.endswith("!")],
            "properties": {name.removesuffix("!"): schema_of(part) for name, part in shape.items()},
        }
    return WORDS[shape] if shape in WORDS else {"type": "string", "enum": [word.strip() for word in shape.split("|")]}


def embedded(shape: Any, value: Any, word: str) -> Iterator[Any]:
    """The parts of a value where its shape says this word."""
    if shape == word:
        yield value
    elif isinstance(shape, dict) and isinstance(value, dict):
        for name, part in shape.items():
            if (key := name.removesuffix("!")) in value:
                yield from embedded(part, value[key], word)
    elif isinstance(shape, list) and isinstance(value, list):
        for part in value:
            yield from embedded(shape[0], part, word)
