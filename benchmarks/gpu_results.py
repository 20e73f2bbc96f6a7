"""The results of `benchmarks.gpu_steps` as one more source that no preset was fitted to, and its copies of KV.

A prompt is measured twice. ``sustained`` steps follow each other, so that the device reaches its limit of power and
lowers its clock. ``rested`` steps follow a pause, at the full clock where they are short.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from replicas.presets import efficiency, preset
from replicas.silicon.fit import Errors
from replicas.silicon.measurements import Measurement, predicted_s

FOLDER = Path(__file__).parent / "results"
PATTERN = "gpu_steps_*.json"
SOURCE = "gpu_steps"
SUSTAINED, RESTED = "sustained", "rested"
BLOCK_TOKENS = 16
LEAST_BLOCKS = 16
"""Blocks of a copy from which on its bandwidth hardly depends on its size."""


def records(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the results of all devices."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(PATTERN))]


def measurements(folder: Path = FOLDER) -> list[Measurement]:
    """Return the measured steps. Their engine is torch, followed by how they were repeated."""
    found = []
    for record in records(folder):
        engine = f"torch {record['torch'].partition('+')[0]}"
        for row in record["rows"]:
            if row["by"] == "step":
                found.append(measurement(row, row["ms"], record["gpu"], f"{engine}, {SUSTAINED}"))
                if "rested_ms" in row:
                    found.append(measurement(row, row["rested_ms"], record["gpu"], f"{engine}, {RESTED}"))
    return found


def measurement(row: dict[str, Any], ms: float, gpu: str, engine: str) -> Measurement:
    """Return a row of a result as a row of the public measurements."""
    work = (float(row["tokens"]), float(row["batch"]), float(row["context"]))
    return Measurement(SOURCE, gpu, row["model"], 1, row["kind"], *work, ms / 1e3, engine, row["note"])


def copies(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return predicted over measured times of copies of at least 16 blocks, by device, model, way and direction.

    ``explained`` is the median of (host time of the call + time of a whole copy of the same bytes) over the measured
    time. It is near 1 where the copy of pages begins only when the host has given all of them to the driver.
    """
    rows = []
    for record in records(folder):
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in record["rows"]:
            if row["by"] == "copy" and row["blocks"] >= LEAST_BLOCKS:
                groups[row["model"], row["how"], row["to"]].append(row)
        for (model, how, to), group in groups.items():
            cost = preset(f"{model}/{record['gpu']}")
            errors = Errors.of(1e3 * cost.swap_s(row["blocks"] * BLOCK_TOKENS) / row["ms"] for row in group)
            named = {"by": "copy", "device": record["gpu"], "model": model, "how": how, "to": to}
            rows.append(named | {"gb_per_s": max(row["gb_per_s"] for row in group)} | asdict(errors))
            if how == "pages":
                whole = {row["blocks"]: row["ms"] for row in groups.get((model, "whole", to), ())}
                shares = [
                    (row["submit_ms"] + whole[row["blocks"]]) / row["ms"] for row in group if row["blocks"] in whole
                ]
                rows[-1] |= {"explained": round(median(shares), 3)} if shares else {}
    return rows


def additions(folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """Yield for each mixed step, at rest, its error and that of its prompt alone, and what both parts alone take.

    If costs add up as the cost model says, both errors are the same.
    """
    for record in records(folder):
        steps = [row for row in record["rows"] if row["by"] == "step"]
        for row in (row for row in steps if row["kind"] == "mixed" and "rested_ms" in row):
            decodes, length = (int(number) for number in row["note"].split("x"))
            prompt = find(steps, row["model"], "prefill", row["tokens"] - decodes, row["context"])
            decode = find(steps, row["model"], "decode", decodes, length)
            if prompt is None or decode is None:
                continue
            yield {
                "by": "addition", "device": record["gpu"], "model": row["model"], "prompt": prompt["tokens"],
                "before": row["context"], "decodes": row["note"],
                "ratio": _ratio(row, record["gpu"]), "prompt_ratio": _ratio(prompt, record["gpu"]),
                "ms": row["rested_ms"], "sum_ms": round(prompt["rested_ms"] + decode["ms"], 3),
            }  # fmt: skip


def find(steps: list[dict[str, Any]], model: str, kind: str, tokens: int, context: int) -> dict[str, Any] | None:
    """Return the step of a model with some tokens and a context, if it was measured."""
    key = model, kind, tokens, context
    return next((row for row in steps if (row["model"], row["kind"], row["tokens"], row["context"]) == key), None)


def _ratio(row: dict[str, Any], gpu: str) -> float:
    measured = measurement(row, row["rested_ms"], gpu, "")
    return round(predicted_s(measured, efficiency(gpu)) / measured.seconds, 3)
