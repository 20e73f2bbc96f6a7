"""Checks a folder with a model's weights before an engine loads it. An engine that fails then has no whole weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import Any

from cluster.core.errors import BadRequest

PATTERN = "*.safetensors"
MAX_HEADER_BYTES = 100 << 20
"""Largest header of a file, which is the format's own limit."""
_LENGTH = Struct("<Q")

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor, by name."""


def check_checkpoint(folder: str, like: str) -> None:
    """Check that a folder has the same tensors as another, and that its files are whole.

    Args:
        folder: the path of the folder.
        like: the folder of the model's weights now. One that has no safetensors, or is no folder, is not compared.

    Raises:
        BadRequest: the folder cannot be loaded. ``param`` is `path`.
    """
    new = _shapes(Path(folder))
    if not Path(like).is_dir() or not any(Path(like).glob(PATTERN)):
        return
    now = _shapes(Path(like))
    if missing := sorted(now.keys() - new.keys()):
        raise _refused(f"{folder} lacks {len(missing)} of the model's tensors, such as {missing[0]}")
    if unknown := sorted(new.keys() - now.keys()):
        raise _refused(f"{folder} has {len(unknown)} tensors that the model has not, such as {unknown[0]}")
    for name, shape in new.items():
        if shape != now[name]:
            raise _refused(f"{folder}: {name} has the shape {list(shape)}; the model needs {list(now[name])}")


def _shapes(folder: Path) -> Shapes:
    try:
        files = sorted(folder.glob(PATTERN)) if folder.is_dir() else None
        if files is None:
            raise _refused(f"{folder} is no folder on this machine")
        if not files:
            raise _refused(f"{folder} has no {PATTERN} files")
        return {name: shape for file in files for name, shape in _header(file).items()}
    except OSError as error:
        raise _refused(f"{folder} cannot be read: {error}") from error


def _header(file: Path) -> Shapes:
    size = file.stat().st_size
    with file.open("rb") as content:
        begin = content.read(_LENGTH.size)
        length = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else 0
        if not 2 <= length <= min(size - _LENGTH.size, MAX_HEADER_BYTES):
            raise _refused(f"{file} is no safetensors file")
        try:
            header: dict[str, Any] = json.loads(content.read(length))
            tensors = {name: one for name, one in header.items() if name != "__metadata__"}
            end = max((one["data_offsets"][1] for one in tensors.values()), default=0)
            shapes = {name: tuple(one["shape"]) for name, one in tensors.items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _refused(f"{file} is no safetensors file: {error}") from error
    if size != _LENGTH.size + length + end:
        raise _refused(f"{file} has {size} bytes instead of {_LENGTH.size + length + end}; it is not whole")
    return shapes


def _refused(message: str) -> BadRequest:
    return BadRequest(f"path: {message}", param="path")
