"""A name for the code that a simulated run depends on, so that a result is used again only if the code is the same.

The code is that of `ROOT` and of all modules of `PACKAGES` that it imports, directly or through others, also within
functions, or names in a registry as ``module:attribute``. Comments and docstrings do not count.
"""

import ast
from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

PACKAGES = ("cluster", "replicas", "router", "predictor_service")
"""Packages whose code is followed."""
ROOT = "cluster.offline.reproduce.running"
DATA = (".json", ".yaml", ".csv")
WITHOUT = "cluster/offline/reproduce/papers"
"""Data that does not count: the plans, whose settings are part of a run."""


def code_state() -> str:
    """Return a name for the code, and for all data of the packages, as they are now."""
    digest = sha256()
    modules = _modules(ROOT)
    for name in sorted(modules):
        digest.update(f"{name}\0{modules[name]}\0".encode())
    for package in PACKAGES:
        root = _folder(package)
        for path in sorted(path for path in root.rglob("*") if path.suffix in DATA):
            inside = f"{package}/{path.relative_to(root).as_posix()}"
            if not inside.startswith(WITHOUT):
                digest.update(f"{inside}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _modules(root: str) -> dict[str, str]:
    """Return the code of ``root`` and of all modules that it uses, by name."""
    found: dict[str, str] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if name in found or (path := _source(name)) is None:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        waiting += _named(tree)
        _drop_docstrings(tree)
        found[name] = ast.dump(tree)
    return found


def _named(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module may import. Some names are of an attribute, and so of no module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def _drop_docstrings(tree: ast.Module) -> None:
    """Remove each text that is a statement: docstrings, also those of attributes."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, field, None), list):
                setattr(node, field, [one for one in body if not _is_text(one)])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _source(name: str) -> Path | None:
    """Return the file of a module of `PACKAGES`; None: it is none."""
    package, *parts = name.split(".")
    if package not in PACKAGES or not all(part.isidentifier() for part in parts):
        return None
    path = _folder(package).joinpath(*parts).with_suffix(".py") if parts else _folder(package) / "__init__.py"
    return path if path.is_file() else None


def _folder(package: str) -> Path:
    return Path(str(files(package)))
