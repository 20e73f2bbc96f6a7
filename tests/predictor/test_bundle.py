import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from cluster.core.errors import ConfigError
from predictor_service.bundle import NOTE, WEIGHTS, Bundle, Origin, data_hash, read_bundle, write_bundle
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.model import TurnContext, TurnOutcome

ORIGIN = Origin("ab" * 32, 12, ("one", "two"), split_seed=3, metrics={"one": {"mae": 4.5}})
BUNDLE = Bundle(
    "tabular",
    7,
    ORIGIN,
    {"turns.first": np.arange(6, dtype=np.float32).reshape(2, 3)},
    {"extra.bin": b"1234"},
    {"k": 1},
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "model", BUNDLE)
    return tmp_path / "model"


def change_note(directory: Path, **changes: object) -> None:
    note = json.loads((directory / NOTE).read_text())
    (directory / NOTE).write_text(json.dumps({**note, **changes}))


def test_what_was_written_is_read(directory: Path) -> None:
    read = read_bundle(directory, "tabular", 7)
    assert (read.model, read.features_version, read.origin, read.settings) == ("tabular", 7, ORIGIN, {"k": 1})
    assert read.parts == BUNDLE.parts
    assert np.array_equal(read.tensors["turns.first"], BUNDLE.tensors["turns.first"])


@pytest.mark.parametrize("name", [WEIGHTS, "extra.bin"])
def test_one_changed_byte_is_refused_by_the_files_name(directory: Path, name: str) -> None:
    content = bytearray((directory / name).read_bytes())
    content[-1] ^= 1
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: sha256: .* damaged"):
        read_bundle(directory)


def test_a_missing_file_and_a_missing_bundle_are_named(directory: Path) -> None:
    (directory / "extra.bin").unlink()
    with pytest.raises(ConfigError, match=r"extra\.bin: cannot be read: No such file"):
        read_bundle(directory)
    with pytest.raises(ConfigError, match=r"nowhere.bundle\.json: cannot be read"):
        read_bundle(directory / "nowhere")


@pytest.mark.parametrize(("version", "age"), [(0, "older"), (2, "newer"), (None, "unknown"), ("1", "unknown")])
def test_other_formats_are_refused(directory: Path, version: object, age: str) -> None:
    change_note(directory, format=version, unheard_of=1)
    with pytest.raises(ConfigError, match=rf"bundle\.json: format: .*{age}.*train again"):
        read_bundle(directory)


def test_other_models_and_features_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"bundle\.json: model: is 'tabular'"):
        read_bundle(directory, "encoder")
    with pytest.raises(ConfigError, match=r"bundle\.json: features_version: is 7; this version reads 8"):
        read_bundle(directory, "tabular", 8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": 5}, "model"),
        ({"origin": {"programs": 1}}, "origin.data_sha256"),
        ({"files": {"../elsewhere": "0"}}, "files"),
        ({"files": None}, "files"),
    ],
)
def test_a_description_that_is_not_one_names_the_field(directory: Path, changes: dict[str, object], field: str) -> None:
    change_note(directory, **changes)
    with pytest.raises(ConfigError, match=rf"bundle\.json: {field}"):
        read_bundle(directory)


def test_weights_that_are_no_tensors_are_refused(directory: Path) -> None:
    write_bundle(directory, Bundle("tabular", 7, ORIGIN, parts={}))
    note = json.loads((directory / NOTE).read_text())
    junk = b"\xff" * 64
    (directory / WEIGHTS).write_bytes(junk)
    change_note(directory, files={**note["files"], WEIGHTS: hashlib.sha256(junk).hexdigest()})
    with pytest.raises(ConfigError, match=r"model\.safetensors: is no safetensors file"):
        read_bundle(directory)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_description_that_is_no_json_object_is_refused(directory: Path, content: bytes) -> None:
    (directory / NOTE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"bundle\.json: "):
        read_bundle(directory)


def test_a_file_in_the_directorys_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="taken: the bundle cannot be written"):
        write_bundle(tmp_path / "taken", BUNDLE)


def test_the_data_hash_is_that_of_a_set_of_programs() -> None:
    def program(name: str, output: int) -> ProgramExample:
        turn = TurnExample(TurnContext(source="s", text="\ud800"), TurnOutcome(output, ""), (0, 0))
        return ProgramExample(name, "s", name, (turn,))

    a, b = program("a", 1), program("b", 2)
    assert data_hash([a, b]) == data_hash([b, a]) != data_hash([a])
    assert data_hash([a]) != data_hash([program("a", 3)])
