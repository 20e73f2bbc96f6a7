"""Caesura's front end beside vLLM's own server on this machine, by `benchmarks.front_end`."""

from benchmarks import front_end
from benchmarks.gpu_kit.model import full_attention
from benchmarks.gpu_kit.task import Findings, Task, measured_by

RESULT = "front_end.json"


def run(task: Task, findings: Findings) -> None:
    """Compare both."""
    rows = measured_by("benchmarks.front_end", arguments(task), task.out / RESULT)
    findings.number("servers", [{**row, "cpu_s_per_1000_tokens": _cpu(row)} for row in rows])
    ours = {row["streams"]: row["ratio"] for row in rows if row["subject"] == front_end.CAESURA}
    findings.check("both servers answer", bool(ours) and all(row["tokens_per_s"] > 0 for row in rows))
    for streams, ratio in ours.items():
        if target := front_end.TARGETS.get(streams):
            findings.target(
                task,
                f"{streams} streams: at least {target:g} times the throughput of vLLM's own server",
                ratio >= target,
                f"{ratio:.2f}",
            )


def arguments(task: Task) -> list[str]:
    """Return the arguments of the comparison."""
    given = ["--out", str(task.out / RESULT), "--subjects", front_end.CAESURA]
    if task.on_gpu:
        given += ["--accelerator", "gpu", "--model", str(full_attention(task))]
    if task.quick:
        return [*given, "--rounds", "1", "--streams", "1", "8", "--tokens", "16"]
    return [*given, "--rounds", "3", "--streams", "1", "16", "64", "256", "--tokens", "128"]


def _cpu(row: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{role} {seconds:.3f}" for role, seconds in row["cpu_s_per_1000_tokens"].items())
