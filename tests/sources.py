"""Syntax trees of the product's own sources."""

import ast
import gc
from pathlib import Path


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file, made without a garbage collection in between.

    Python 3.11 keeps the depth of the tree that is being made in one place for all. A collection may run a finalizer
    that logs a traceback, which makes a tree of its own: the outer one then fails with a `SystemError`.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if enabled:
            gc.enable()
