"""What the process of a part receives, and what it hands back: checks and numbers."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.parts import CUDA, LIMIT_S

Number = float | int | str | bool | None
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """One call of a part."""

    part: str
    device: str
    """``cuda``, or ``cpu`` for a rehearsal."""
    cache: Path
    """Folder in which the kit's models are made."""
    out: Path
    """Folder of the results."""
    model: Path | None = None
    """A model's folder; None: the kit makes one with random weights."""
    quick: bool = False
    """Whether sizes and times are small: to see that the code runs. The numbers mean nothing."""
    limit_s: float = LIMIT_S
    """Seconds after which the process is ended."""

    @property
    def on_gpu(self) -> bool:
        """Whether the part measures a GPU."""
        return self.device == CUDA


@dataclass(slots=True)
class Findings:
    """Checks and numbers of a part, written to a file after each, so that a part that is ended leaves what it has."""

    path: Path
    checks: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Number | Rows] = field(default_factory=dict)
    complete: bool = False

    def check(self, name: str, passed: bool, detail: str = "") -> bool:
        """Record whether something holds, and return it.

        Args:
            name: what has to hold, as a sentence.
            passed: whether it does.
            detail: what was found.
        """
        self.checks.append({"check": name, "passed": bool(passed), "detail": detail})
        print(f"{'passed' if passed else 'FAILED'}: {name}{f' ({detail})' if detail else ''}", flush=True)
        self.write()
        return passed

    def target(self, task: Task, name: str, met: bool, detail: str) -> None:
        """Record whether a target is met: a check, but in a quick run only a number."""
        if task.quick:
            self.number(name, f"{detail} (not judged in a quick run)")
        else:
            self.check(name, met, detail)

    def number(self, name: str, value: Number | Rows) -> None:
        """Record a number, or rows of numbers, under a name that has the unit."""
        self.numbers[name] = value
        self.write()

    def write(self) -> None:
        """Write the file, at once or not at all."""
        content = {
            "complete": self.complete,
            "checks": self.checks,
            "numbers": self.numbers,
        }
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


def measured_by(module: str, arguments: Sequence[str], result: Path) -> list[dict[str, Any]]:
    """Run a benchmark and return the rows that it saved.

    Args:
        module: the benchmark. Its exit status is 1 where it misses a target of its own, which is no error here.
        arguments: its arguments.
        result: the file that it writes.

    Raises:
        RuntimeError: it wrote no result.
    """
    result.unlink(missing_ok=True)
    status = subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
    if not result.exists():
        raise RuntimeError(f"{module} ended with status {status} and without a result; the log has its error")
    rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))["rows"]
    return rows
