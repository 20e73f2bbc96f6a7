"""values.schema.json: current, and so closed that no misspelt key gets through."""

import copy
import json
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.deploy.chart import CHART, PRESETS, ROOT, Refused, needs_helm, template

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

OPEN = {
    "kvVolume",
    *(f"{place}.{key}" for place in ("head", "workerGroups.workers", "redis") for key in ("nodeSelector", "affinity")),
    *(f"{place}.{key}" for place in ("head", "workerGroups.workers") for key in ("podAnnotations", "podLabels")),
    *(
        f"{place}.{side}"
        for place in (
            "head.resources",
            "workerGroups.workers.resources",
            "redis.resources",
            "modelCache.download.resources",
            "autoscaling.seatResources",
        )
        for side in ("requests", "limits")
    ),
    "commonLabels",
    "ingress.annotations",
    "service.annotations",
    "serviceAccount.annotations",
    "monitoring.labels",
    "monitoring.dashboardLabels",
}
"""Labels, annotations, resources and what else has keys of Kubernetes' or of its own: everything else is closed."""


def sections(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict):
        yield path
        for key, part in values.items():
            yield from sections(part, (*path, key))


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict) and values:
        for key, part in values.items():
            yield from leaves(part, (*path, key))
    else:
        yield path


def at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def accepted(values: Any) -> bool:
    return Draft7Validator(SCHEMA).is_valid(values)


def test_it_is_current() -> None:
    written = runpy.run_path(str(ROOT / "helm" / "values_schema.py"))["values_schema"]()
    assert written == SCHEMA, "python helm/values_schema.py"


def test_it_is_a_schema_and_takes_the_defaults_and_the_presets() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert accepted(VALUES)


@pytest.mark.parametrize("path", [".".join(path) for path in sections(VALUES)])
def test_an_unknown_key_is_refused_in_every_section(path: str) -> None:
    mutated = copy.deepcopy(VALUES)
    at(mutated, tuple(path.split(".")) if path else ())["surprise"] = "x"
    assert accepted(mutated) == (path in OPEN)


@pytest.mark.parametrize("path", [".".join(path) for path in leaves(VALUES)])
def test_every_misspelt_key_is_refused(path: str) -> None:
    *parents, key = path.split(".")
    mutated = copy.deepcopy(VALUES)
    section = at(mutated, tuple(parents))
    section[key + "s"] = section.pop(key)
    assert accepted(mutated) == (".".join(parents) in OPEN)


@pytest.mark.parametrize("path", [".".join(path) for path in leaves(VALUES)])
def test_a_value_of_another_type_is_refused(path: str) -> None:
    *parents, key = path.split(".")
    mutated = copy.deepcopy(VALUES)
    at(mutated, tuple(parents))[key] = [[1]]
    assert not accepted(mutated)


def config_sections() -> Iterator[tuple[str, ...]]:
    """Of Caesura's own configuration, as the schema describes it."""

    def walk(schema: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        if schema.get("additionalProperties") is False:
            yield path
            for key, part in schema["properties"].items():
                yield from walk(part, (*path, key))

    yield from walk(SCHEMA["properties"]["config"], ())


@pytest.mark.parametrize("path", [".".join(path) for path in config_sections()])
def test_an_unknown_key_of_caesuras_configuration_is_refused_too(path: str) -> None:
    config: dict[str, Any] = {"surprise": 1}
    for key in reversed(path.split(".") if path else []):
        config = {key: config}
    assert not accepted({**VALUES, "config": config})


@pytest.mark.parametrize("key", ["redis.url", "redis.path", "auth.file", "http.host", "http.port"])
def test_what_the_chart_decides_cannot_be_said(key: str) -> None:
    section, name = key.split(".")
    assert not accepted({**VALUES, "config": {section: {name: "redis://elsewhere"}}})


@pytest.mark.parametrize("name", ["Agents", "agents_1", "agents.eu", "-agents", "agents-", "1agents", "a" * 64])
def test_a_name_that_kubernetes_refuses_is_refused(name: str) -> None:
    assert accepted({**VALUES, "fullnameOverride": "agents-1"})
    assert not accepted({**VALUES, "fullnameOverride": name})


@needs_helm
@pytest.mark.parametrize("preset", PRESETS)
def test_helm_refuses_what_the_schema_refuses(preset: str) -> None:
    for wrong in (
        {"surprise": 1},
        {"fullnameOverride": "Agents"},
        {"config": {"polciy": {}}},
        {"config": {"policy": {"name": "mars", "parameters": {"surprise": 1}}}},
        {"redis": {"external": {"port": "6379"}}},
        {"workerGroups": {"UPPER": {"replicas": 1, "resources": {"requests": {}, "limits": {}}}}},
        {"keys": {"entries": [{"tenant": "a", "key": "csk-not-a-digest"}]}},
    ):
        with pytest.raises(Refused, match="schema"):
            template(wrong, preset=preset)
