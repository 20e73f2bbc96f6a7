"""Where the packages of other projects are imported from, and why a comparison with them is skipped.

None of them is a requirement of Caesura. They are installed into a folder of their own, without their requirements,
which the environment already has. `make tables` does that in ``.cache/peers/packages``; by hand:

    pip install --no-deps --target FOLDER -r requirements/peers.txt
    python -m benchmarks.other_simulator --peers FOLDER
"""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

SKIPPED = 77
"""Exit status of a comparison whose peer is absent: it measured nothing. It is automake's status of a skipped test."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--peers``, the folder of the other projects' packages."""
    parser.add_argument("--peers", type=Path, default=None, help="folder with the other projects' packages")


def use(folder: Path | None) -> None:
    """Import packages from ``folder`` too, after those of the environment."""
    if folder is not None:
        sys.path.append(str(folder.resolve()))


def why_absent(module: str) -> str | None:
    """Return why ``module`` cannot be imported, with what to do about it; None if it is there."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return None
    return f"skipped: there is no module {module!r}; install it as benchmarks/peer_packages.py says and give --peers"


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, ``unknown`` if it has none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
