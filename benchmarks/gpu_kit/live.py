"""The same programs live and simulated on this machine, by `benchmarks.live_against_simulated`."""

from typing import Any

from benchmarks.gpu_kit.model import full_attention
from benchmarks.gpu_kit.task import Findings, Task, measured_by

RESULT = "live_against_simulated.json"
MEANS = {"completion": "completion_all_s", "TTFT": "ttft_all_s"}
"""Means that the report shows, and their keys in a row."""


def run(task: Task, findings: Findings) -> None:
    """Compare both sides."""
    *rows, last = measured_by("benchmarks.live_against_simulated", arguments(task), task.out / RESULT)
    findings.number("programs per second", last["rate_per_s"])
    findings.number("policies", [shown(row) for row in rows])
    findings.number("order, live, by goodput", ", ".join(last["order"]["live"]["goodput"]))
    findings.number("order, simulated, by goodput", ", ".join(last["order"]["simulated"]["goodput"]))
    findings.number("seconds of a turn beside its steps", last["cost_model"]["turn_s"])
    findings.check(
        "live programs complete under every policy",
        all(row["live"]["completed"] > 0 for row in rows),
        ", ".join(f"{row['policy']} {row['live']['completed']}" for row in rows),
    )
    inverted = "; ".join(f"{key}: {one} and {other}" for key, one, other in last["inverted"])
    findings.target(task, "no two policies are in another order", not inverted, inverted or "none is")
    far = last["beyond_15_percent"]
    beyond = ", ".join(f"{policy}: {key}" for policy, key in far)
    findings.target(
        task, "the simulator is within 15% in goodput and completion time", not far, f"beyond: {beyond or 'none'}"
    )


def arguments(task: Task) -> list[str]:
    """Return the arguments of the comparison."""
    given = ["--json", str(task.out / RESULT)]
    if task.on_gpu:
        given += ["--accelerator", "gpu", "--model", str(full_attention(task)), "--find-rate"]
    if task.quick:
        return [*given, "--blocks", "1", "--duration-s", "12", "--warmup-s", "2", "--policies", "vllm,caesura"]
    return [*given, "--blocks", "2", "--duration-s", "25", "--warmup-s", "5"]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's row of the report."""
    found: dict[str, Any] = {"policy": row["policy"]}
    for side in ("live", "simulated"):
        found |= {f"{side} goodput/s": row[side]["goodput"], f"{side} attainment": row[side]["attainment"]}
        found |= {f"{side} {name} s": row[side]["means"][key] for name, key in MEANS.items()}
    return found | {f"{key}, simulated / live": value for key, value in row["ratio"].items()}
