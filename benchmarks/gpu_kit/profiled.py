"""`caesura profile` on this machine, and the preset of this GPU against the steps that it measured."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_kit.model import PRESET, full_attention
from benchmarks.gpu_kit.task import Findings, Task
from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel
from replicas.presets import DEVICES, MODELS, TINY_CPU, preset

COSTS = "profile_costs.json"
PROGRAM = "from cluster.cli import main; main()"
MOST_ERROR = 0.25
"""Largest mean error of the fit."""
COEFFICIENTS = (
    *("overhead_s", "sequence_s", "weights_s", "token_s", "context_s", "pair_s", "swap_token_s", "swap_overhead_s"),
    *("turn_s", "kv_capacity_tokens", "kv_bytes_per_token"),
)
MEMORY_OFF = 0.05
"""Largest relative difference of the memory of the GPU at hand and that of a preset with its name."""


def run(task: Task, findings: Findings) -> None:
    """Measure the engine, and compare the measured steps with the preset."""
    costs = task.out / COSTS
    measured = subprocess.run(command(task, costs), check=False)
    if not findings.check("caesura profile ends well", measured.returncode == 0, f"status {measured.returncode}"):
        return
    content = json.loads(costs.read_text(encoding="utf-8"))
    model, fit, samples = CostModel.load(costs), content["fit"], content["samples"]
    findings.number("samples", len(samples))
    findings.number("mean error of the fit", fit["mean_error"])
    findings.number("largest error of the fit", fit["max_error"])
    name = f"the mean error of the fit is below {MOST_ERROR:.0%}"
    findings.target(task, name, fit["mean_error"] < MOST_ERROR, f"{fit['mean_error']:.1%}")
    try:
        expected = preset_of(task)
    except ConfigError as error:
        findings.number("preset", f"there is none: {error}")
        expected = None
    findings.number("coefficients", list(_coefficients(model, expected)))
    if expected is not None:
        findings.number("preset", expected.name)
        findings.number("predicted over measured", list(_errors(expected, samples, fit["request_s"])))
    findings.number("measured steps", [{**row, "ms": 1e3 * row["seconds"]} for row in samples])


def command(task: Task, costs: Path) -> list[str]:
    """Return the command that profiles the engine of a task."""
    arguments = ["profile", "--out", str(costs), *(["--quick"] if task.quick else [])]
    settings = {"model.source": str(full_attention(task)), "replicas.accelerator": "gpu" if task.on_gpu else "cpu"}
    if not task.on_gpu:
        settings |= {"engine.max_model_len": "4096"}
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    return [sys.executable, "-c", PROGRAM, *arguments]


def preset_of(task: Task) -> CostModel:
    """Return the preset of the model and the GPU at hand.

    Raises:
        ConfigError: there is none; the message says of what.
    """
    if not task.on_gpu:
        return TINY_CPU
    name = PRESET if task.model is None else task.model.resolve().name.lower()
    models = [known for known in MODELS if known in name]
    if not models:
        raise ConfigError(f"no model of {', '.join(MODELS)} is in the name {name!r}")
    about = torch.cuda.get_device_properties(0)
    return preset(f"{models[0]}/{device_named(about.name, about.total_memory)}")


def device_named(name: str, memory_bytes: int) -> str:
    """Return the preset's name of a GPU.

    Args:
        name: its name, as CUDA reports it.
        memory_bytes: its memory, which tells forms of the same GPU apart.

    Raises:
        ConfigError: no preset has such a device.
    """
    words = name.lower().replace("-", " ").split()
    for known, device in DEVICES.items():
        parts = [part for part in known.split("-") if known.startswith("rtx") or not part.isdigit()]
        near = abs(memory_bytes / device.memory_bytes - 1) < MEMORY_OFF
        if near and all(part in words for part in parts):
            return known
    raise ConfigError(f"no device of {', '.join(DEVICES)} is {name!r} with {memory_bytes / 2**30:.1f} GiB")


def _coefficients(model: CostModel, expected: CostModel | None) -> Iterator[dict[str, Any]]:
    for name in COEFFICIENTS:
        measured, preset_value = getattr(model, name), getattr(expected, name, None)
        row = {"coefficient": name, "measured": measured}
        if preset_value is not None:
            row |= {"preset": preset_value, "preset / measured": preset_value / measured if measured else None}
        yield row


def _errors(expected: CostModel, samples: Sequence[dict[str, Any]], request_s: float) -> Iterator[dict[str, Any]]:
    """Yield the preset's predictions over the measured steps, without the requests' way in and out of the engine."""
    for phase, with_request in (("prefill", True), ("decode", False)):
        ratios = sorted(
            expected.step_s(row["tokens"], row["context"], row["sequences"], row["pairs"])
            / max(row["seconds"] - row["requests"] * request_s, 1e-9)
            for row in samples
            if bool(row["requests"]) == with_request
        )
        if ratios:
            tenth = len(ratios) // 10
            yield {
                "phase": phase, "steps": len(ratios), "median": median(ratios), "p10": ratios[tenth],
                "p90": ratios[-1 - tenth],
            }  # fmt: skip
