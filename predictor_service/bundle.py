"""Writes and reads bundles: directories with the files of a trained model, and `bundle.json`, which describes them.

`bundle.json` is written last and contains the SHA-256 of every other file. An incomplete or changed bundle is therefore
rejected, with the name of the file. Files are tensors (safetensors), text or msgpack, and cannot contain code.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from cluster.core.errors import ConfigError
from cluster.core.registry import PREDICTORS
from predictor_service.examples import TEST_SHARE, ProgramExample

FORMAT = 1
"""Version of the format. Raise it with every change of the files' meaning."""
NOTE, WEIGHTS = "bundle.json", "model.safetensors"
MAX_FILE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Origin:
    """The programs that a model was trained on."""

    data_sha256: str | None = None
    """Hash of the data, see `data_hash`; None if it is unknown."""
    programs: int = 0
    sources: tuple[str, ...] = ()
    split_seed: int | None = None
    """Seed of the split whose train side was used; None if all of the data was used."""
    test_share: float = TEST_SHARE
    """Share of the groups that this split left out."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The model's scores by source on the test side, for information only."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model with its name and its origin."""

    name: str
    model: Any
    """The model, with the protocols of `predictor_service.model` that models of its name have."""
    origin: Origin

    def save(self, directory: Path) -> None:
        """Write a bundle.

        Raises:
            ConfigError: it cannot be written.
        """
        self.model.save(directory, self.origin)


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """The content of a bundle's directory."""

    model: str
    """Name of the model in the registry."""
    features_version: int
    origin: Origin
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the other files, by name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model."""

    def part(self, name: str) -> bytes:
        """Return the content of one of the `parts`.

        Raises:
            ValueError: there is no file of this name.
        """
        if name not in self.parts:
            raise ValueError(f"{name}: is not in the bundle")
        return self.parts[name]

    @contextmanager
    def reading(self, directory: Path) -> Iterator[None]:
        """Turn a ValueError about the content into a ConfigError that names the directory."""
        try:
            yield
        except ValueError as error:
            raise ConfigError(f"{directory}: {error}") from error


class _Origin(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    data_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None
    programs: Annotated[int, Field(ge=0)]
    sources: tuple[str, ...] = Field(strict=False)
    split_seed: int | None
    test_share: Annotated[float, Field(gt=0, lt=1)] = TEST_SHARE
    metrics: dict[str, Any]


class _Note(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: int
    model: str
    features_version: int
    origin: _Origin
    settings: dict[str, Any]
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")], str]
    """SHA-256 of each file, by name."""


def load_model(directory: Path) -> StoredModel:
    """Load the model of a bundle, which may be any registered one.

    Raises:
        ConfigError: it is no complete bundle of a registered model in this version; the message names the file and the
            field.
    """
    bundle = read_bundle(directory)
    if bundle.model not in PREDICTORS:
        raise ConfigError(f"{directory / NOTE}: model: is {bundle.model!r}, not one of: {', '.join(PREDICTORS)}")
    return StoredModel(bundle.model, PREDICTORS.load(bundle.model).load(directory), bundle.origin)


def bundle_id(directory: Path) -> str:
    """Return a SHA-256 that only bundles with the same content share.

    Raises:
        ConfigError: the description of the bundle cannot be read.
    """
    return hashlib.sha256(_content(directory / NOTE)).hexdigest()


def data_hash(programs: Iterable[ProgramExample]) -> str:
    """Return a SHA-256 over everything that a model can learn from these programs. Their order does not matter."""
    digests = sorted(hashlib.sha256(repr(program).encode("utf-8", "backslashreplace")).digest() for program in programs)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def write_bundle(directory: Path, bundle: Bundle) -> None:
    """Write or replace the bundle in ``directory``, which is created if necessary.

    Raises:
        ConfigError: it cannot be written.
    """
    files = dict(bundle.parts)
    if bundle.tensors:
        files[WEIGHTS] = save_tensors({name: np.ascontiguousarray(a) for name, a in bundle.tensors.items()})
    note = {
        "format": FORMAT,
        "model": bundle.model,
        "features_version": bundle.features_version,
        "origin": {
            "data_sha256": bundle.origin.data_sha256,
            "programs": bundle.origin.programs,
            "sources": list(bundle.origin.sources),
            "split_seed": bundle.origin.split_seed,
            "test_share": bundle.origin.test_share,
            "metrics": dict(bundle.origin.metrics),
        },
        "settings": dict(bundle.settings),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _replace(directory / name, content)
        _replace(directory / NOTE, json.dumps(note, indent=2, ensure_ascii=True).encode())
    except OSError as error:
        raise ConfigError(f"{directory}: the bundle cannot be written: {error}") from error


def read_bundle(directory: Path, model: str | None = None, features_version: int | None = None) -> Bundle:
    """Read the bundle of a directory.

    Args:
        directory: the directory.
        model: the name that the model must have; None accepts any.
        features_version: the version of the features that it must have; None accepts any.

    Raises:
        ConfigError: there is no bundle, a file is missing or changed, or the format, the model or the version of the
            features is another one; the message names the file and the field.
    """
    note = _read_note(directory / NOTE)
    for field_name, found, wanted in (
        ("model", note.model, model),
        ("features_version", note.features_version, features_version),
    ):
        if wanted is not None and found != wanted:
            raise ConfigError(
                f"{directory / NOTE}: {field_name}: is {found!r}; this version reads {wanted!r}: train again"
            )
    files = {name: _read_file(directory / name, digest) for name, digest in note.files.items()}
    try:
        tensors = load_tensors(files.pop(WEIGHTS)) if WEIGHTS in files else {}
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory / WEIGHTS}: is no safetensors file: {error}") from error
    origin = Origin(**note.origin.model_dump())
    return Bundle(note.model, note.features_version, origin, tensors, files, note.settings)


def _read_note(path: Path) -> _Note:
    content = _content(path)
    try:
        version = json.loads(content).get("format")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no bundle's description: {error}") from error
    # This is checked first, because another format may have other fields.
    if version != FORMAT:
        age = "newer" if isinstance(version, int) and version > FORMAT else "older or unknown"
        raise ConfigError(f"{path}: format: is {version!r}, {age}; this version reads {FORMAT}: train again")
    try:
        return _Note.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _read_file(path: Path, digest: str) -> bytes:
    content = _content(path)
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ConfigError(
            f"{path}: sha256: is {found[:12]}..., not {digest[:12]}... as {NOTE} says: the file is damaged"
        )
    return content


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: size: is over {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees either the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.replace(path)
