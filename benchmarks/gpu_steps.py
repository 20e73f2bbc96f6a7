"""Times of decode, prefill and mixed steps, and of copies to the host, measured on the GPU at hand with torch alone.

``python -m benchmarks.gpu_steps --json FILE`` runs on a bare machine with CUDA, torch and Triton; of this repository it
imports only the ``benchmarks.gpu_*`` beside it. The layers have the sizes of real models and random weights of 16 bits.
A step is one CUDA graph of embedding, layers, output layer and argmax. It has no scheduler, no sampler and no host
time. Attention is the fastest for each shape of torch's kernels and of one in Triton. So a step is not vLLM's, but its
matrix products and the bytes that it reads are alike. `benchmarks.silicon` compares kept results with the presets.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_copies import Copies, measure_copies, measure_overlap
from benchmarks.gpu_kernels import BLOCK, name_of
from benchmarks.gpu_model import SHAPES, Model, Step, Timer, Work, checked, choose, clocks, columns, summary

DECODES = [Work(decodes=n, length=1024) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
DECODES += [Work(decodes=n, length=4096) for n in (1, 4, 8, 16, 32, 64, 96, 128)]
DECODES += [Work(decodes=n, length=16384) for n in (1, 4, 8, 16, 24, 48)]
PREFILLS = [Work(new=n) for n in (512, 1024, 2048, 4096, 8192)]
PREFILLS += [Work(new=n, context=c) for c in (4096, 16384) for n in (512, 2048, 8192)]
MIXED = [Work(n, c, 64, length) for length in (1024, 4096) for c in (0, 4096) for n in (512, 2048)]
SHORT_DECODES = [Work(decodes=n, length=1024) for n in (1, 8, 32, 48)]
SHORT_DECODES += [Work(decodes=n, length=4096) for n in (1, 8, 12)] + [Work(decodes=n, length=16384) for n in (1, 2)]
SHORT_PREFILLS = [Work(new=n, context=c) for n, c in ((512, 0), (2048, 0), (8192, 0), (2048, 4096))]
SHORT_MIXED = [Work(new=n, decodes=32, length=1024) for n in (512, 2048)]
COPIED = (1, 4, 16, 64, 256, 512)
"""Blocks of a copy."""
OVERLAPPED = "llama-3.1-8b"
BESIDE = (Work(decodes=64, length=4096), Work(decodes=8, length=1024), Work(new=2048))
"""The model and the steps beside which copies run."""
GRIDS = {
    "llama-3.1-8b": [*DECODES, *PREFILLS, *MIXED],
    "vicuna-13b": [*SHORT_DECODES, *SHORT_PREFILLS, *SHORT_MIXED],
    "opt-13b": [*SHORT_DECODES, *SHORT_PREFILLS, *SHORT_MIXED],
    "tiny": [Work(decodes=3, length=70), Work(decodes=1, length=33), Work(new=24), Work(8, 16), Work(8, 16, 3, 40)],
}


def measure_steps(
    name: str, model: Model, right: dict[str, list[Any]], timer: Timer, end_s: float, errors: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield one row for each shape of step that fits, until ``end_s`` of the host's clock."""
    for work in GRIDS[name]:
        if work.blocks > model.blocks or time.perf_counter() > end_s:
            print(f"left out: {name} {work}", flush=True)
            continue
        try:
            step = Step(model, work)
            attention = choose(step, right, timer)
            run = timer.prepared(step.run)
            times = summary(timer.seconds(run)) | clocks()
            if work.new:
                rested = summary(timer.rested(run, count=5 if timer.cuda else 1))
                times |= {"rested_ms": rested["ms"], **{f"rested_{name}": value for name, value in clocks().items()}}
            del run
        except RuntimeError as error:
            errors[f"{name} {work}"] = str(error)[:200]
            continue
        yield {"by": "step", "model": name, **columns(work), **times, "attention": attention}
        print(f"{name} {work.kind} {work} {times} {attention}", flush=True)
        if timer.cuda:
            torch.cuda.empty_cache()


def machine(device: str) -> dict[str, Any]:
    """Return the names and versions of what the numbers were measured with."""
    about = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "triton": triton.__version__}
    if device != "cuda":
        return about | {"device": "cpu", "gpu": "cpu"}
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    name = torch.cuda.get_device_name()
    known = [gpu for gpu in ("h100", "h200", "b200") if gpu in name.lower()]
    cudnn_version = torch.backends.cudnn.version()
    return about | {"device": name, "gpu": known[0] if known else name, "driver": driver, "cudnn": cudnn_version}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of the result")
    parser.add_argument("--models", default="llama-3.1-8b,vicuna-13b,opt-13b", help="models, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds after which no further shape is begun")
    arguments = parser.parse_args()
    if unknown := set(arguments.models.split(",")) - SHAPES.keys():
        parser.error(f"--models: no {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    start = time.perf_counter()
    torch.manual_seed(0)
    device, timer = arguments.device, Timer(arguments.device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    errors: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    command = f"python -m benchmarks.gpu_steps --json FILE --models {arguments.models}"
    record = {"command": command, **machine(device), "errors": errors, "rows": rows}
    right = checked(device, dtype, timer, errors)
    print(f"attention: { ({part: [name_of(k) for k in found] for part, found in right.items()}) }, errors {errors}")
    if not all(right.values()):
        return 1
    for name in ["tiny"] if arguments.tiny else arguments.models.split(","):
        shape = SHAPES[name]
        copies = copies_of(name, rows, errors) if device == "cuda" else None
        model = Model(shape, device, None if device == "cuda" and not arguments.tiny else 64, dtype)
        print(f"{name}: {model.blocks * BLOCK} tokens of KV, {time.perf_counter() - start:.0f} s", flush=True)
        if copies and name == OVERLAPPED:
            rows += measure_overlap(name, model, BESIDE, right, copies, timer)
        rows += measure_steps(name, model, right, timer, start + arguments.limit_s, errors)
        arguments.json.write_text(json.dumps(record | {"seconds": round(time.perf_counter() - start)}, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s, errors {errors}", flush=True)
        del model, copies
        if device == "cuda":
            torch.cuda.empty_cache()
    return 0


def copies_of(name: str, rows: list[dict[str, Any]], errors: dict[str, str]) -> Copies | None:
    """Measure copies of a model's KV and return them, or None if they do not work here."""
    shape = SHAPES[name]
    try:
        copies = Copies(shape, max(16, (1 << 30) // (shape.kv_bytes_per_token * BLOCK)))
        rows += measure_copies(name, copies, [count for count in COPIED if count <= copies.blocks])
    except (RuntimeError, AttributeError, OSError) as error:
        errors[f"{name} copies"] = str(error)[:200]
        return None
    return copies


if __name__ == "__main__":
    sys.exit(main())
