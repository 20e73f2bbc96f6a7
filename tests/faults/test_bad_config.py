"""Every key of the configuration and of the chart's values, mutated: refused, with the field's name in the error."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from cluster.config.loader import dump_config, load_config
from cluster.core.errors import ConfigError
from cluster.core.registry import POLICIES
from tests.deploy.test_chart_schema import OPEN, SCHEMA, VALUES, at, leaves

FAULT = "a configuration key mutated"

SAMPLE: dict[str, Any] = {
    "engine": {"max_model_len": 1024},
    "models": {"big": {"replicas": {"count": 2}, "slo": {"ttft_s": 2.0}}},
    "model_routing": {"agent": [{"model": "big", "tools": ["bash"], "max_start_s": 2}, {"model": "tiny"}]},
    "tenants": {"acme": {"models": ["tiny"], "requests_per_s": 5, "slo": {"ttft_s": 3.0}}},
    "tools": {
        "defined": {
            "book": {"kind": "http", "url": "http://a/{id}", "headers": {"a": "b"}, "private_networks": ["10.0.0.0/8"]},
            "item": {"kind": "http", "openapi": {"document": "http://a/b", "operation": "c", "server": "http://a"}},
            "list": {"kind": "command", "argv": ["ls"], "environment": {"A": "b"}, "read_only_paths": ["/a"]},
            "root": {"kind": "python", "entry": "math:sqrt", "memory_bytes": 1 << 27},
            "notes": {"kind": "mcp", "command": ["a"], "environment": {"A": "b"}, "allowed_tools": ["a"]},
        },
        "request_networks": ["10.0.0.0/8"],
    },
    "predictor": {"mode": "service"},
}
"""With every kind of section that the defaults have none of."""

FREE = ("engine.", "models.big.engine", *(f"tools.defined.{name}.parameters." for name in SAMPLE["tools"]["defined"]))
"""vLLM's own arguments and JSON Schemas: what is in them is checked by the engine and when the tools are opened."""

NAMED = ("model_routing.agent", "headers.a", "environment.A", "tenant_weights.acme")
"""Keys that the operator chooses: no spelling of them is wrong."""

OF_THE_SAMPLE = frozenset(SAMPLE)


def filled_in(said: dict[str, Any], file: Path) -> dict[str, Any]:
    """A configuration with every default."""
    file.write_text(yaml.safe_dump(said))
    dumped = yaml.safe_load(dump_config(load_config(file, {})))
    assert isinstance(dumped, dict)
    return dumped


def complaint(file: Path | None, key: str, value: Any) -> str:
    """What is said of a configuration with this key; nothing if it is accepted."""
    try:
        load_config(file, {}, {key: value})
    except ConfigError as error:
        return str(error)
    return ""


def set_at(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    mutated = copy.deepcopy(values)
    at(mutated, path[:-1])[path[-1]] = value
    return mutated


def misspelt(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    mutated = copy.deepcopy(values)
    section = at(mutated, path[:-1])
    section[path[-1] + "s_"] = section.pop(path[-1])
    return mutated


def mutations(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and wrong value, or a key that there is not."""
    for path in leaves(values):
        name, value = ".".join(path), at(values, path)
        if name.startswith(FREE):
            continue
        yield name, [[1]]
        if not name.endswith(NAMED):
            yield f"{name}s_", value
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield from ((name, wrong) for wrong in (math.nan, math.inf, -math.inf, -(10**400), "1; drop"))


def test_every_key_of_the_configuration(tmp_path: Path, promised: Any) -> None:
    sample = tmp_path / "sample.yaml"
    every = filled_in(SAMPLE, sample)
    sample.write_text(yaml.safe_dump(SAMPLE))
    told: list[tuple[str, Any, str]] = []
    for key, value in mutations(every):
        told.append((key, value, complaint(sample if key.partition(".")[0] in OF_THE_SAMPLE else None, key, value)))
    for policy in POLICIES:
        file = tmp_path / f"{policy}.yaml"
        values = filled_in({"policy": {"name": policy}}, file)["policy"]
        file.write_text(yaml.safe_dump({"policy": {"name": policy}}))
        parameters = {"policy": {"parameters": values["parameters"]}} if values["parameters"] else {}
        told += [(key, value, complaint(file, key, value)) for key, value in mutations(parameters)]
    assert len(told) > 800
    accepted = [(key, value) for key, value, said in told if not said]
    unnamed = [one for one in told if one[2] and not _names(one[0], one[2])]
    assert not accepted and not unnamed, (accepted, unnamed)
    promised(FAULT, f"accepted, of {len(told)}", len(accepted), exactly=0)
    promised(FAULT, f"refused without the field's name, of {len(told)}", len(unnamed), exactly=0)


def _names(key: str, told: str) -> bool:
    section, _, last = key.rpartition(".")
    told = told.partition(": ")[2]  # without the flag, which repeats the key
    return section in told and last in told


def test_every_key_of_the_charts_values(promised: Any) -> None:
    validator = Draft7Validator(SCHEMA)
    accepted, unnamed, count = [], [], 0
    for path in leaves(VALUES):
        for mutated in (set_at(VALUES, path, [[1]]), misspelt(VALUES, path)):
            if mutated == set_at(VALUES, path, [[1]]) or ".".join(path[:-1]) not in OPEN:
                count += 1
                told = [json.dumps([*error.absolute_path, error.message]) for error in validator.iter_errors(mutated)]
                accepted += [] if told else [path]
                unnamed += [] if any(path[-1] in one for one in told) else [path]
    assert not accepted and not unnamed, (accepted, unnamed)
    promised("a value of the chart mutated", f"accepted, of {count}", len(accepted), exactly=0)
    promised("a value of the chart mutated", f"refused without the field's name, of {count}", len(unnamed), exactly=0)
