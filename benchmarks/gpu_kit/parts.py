"""The parts of the kit, in the order in which they run, and where each keeps its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 600.0
"""Seconds that a part may take; one that takes longer is ended and has failed."""

CUDA, CPU = "cuda", "cpu"
FIRST = "environment"
"""The part that all others need."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a process of its own."""

    name: str
    module: str
    """Module of this package whose ``run`` is called with the task and the findings."""
    title: str

    def files(self, out: Path) -> "Files":
        """Return the paths of its files in the folder of the results."""
        return Files(out / f"{self.name}.json", out / f"{self.name}.findings.json", out / f"{self.name}.log")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one part."""

    record: Path
    """The result, which the runner writes."""
    findings: Path
    """What the part's process writes while it runs: checks and numbers."""
    log: Path
    """Everything that the process and its children print."""


PARTS = (
    Part(FIRST, "environment", "GPU, driver, CUDA builds of torch and vLLM, shared memory, the model"),
    Part("contracts", "contracts", "Hold, swap out, load, resume: identical tokens, and no block leaks (16 bits)"),
    Part("contracts-float32", "contracts", "The same in 32 bits, and compared with contexts that are computed again"),
    Part("pressure-1", "pressure", "10 minutes of load on the full host tier, full attention"),
    Part("pressure-2", "pressure", "10 minutes more, with layers of sliding-window attention"),
    Part("pressure-vllm", "pressure", "The load of pressure-2 on vLLM's own tier, for comparison (5 minutes)"),
    Part("profile", "profiled", "`caesura profile`, compared with the preset of this GPU"),
    Part("live", "live", "The same programs on a live cluster and in the simulator"),
    Part("front_end", "front", "Caesura's front end beside vLLM's own server"),
)


def chosen(names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, in the order of `PARTS`, and the one that they need; no names: all.

    Raises:
        ValueError: there is no such part; the message names the option.
    """
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ValueError(f"--parts {name}: there are {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names or part.name == FIRST]
