"""The part that the others need: device, driver, CUDA builds, shared memory, and the model."""

import json
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from vllm.platforms import current_platform

from benchmarks.gpu_kit.contracts import memory_of as memory_of_contracts
from benchmarks.gpu_kit.model import SMALL, full_attention, sizes_of, sliding_window
from benchmarks.gpu_kit.pressure import memory_of as memory_of_pressure
from benchmarks.gpu_kit.probe import ROOT
from benchmarks.gpu_kit.task import Findings, Task
from cluster.core.clock import MonotonicClock
from replicas.tier_size import SHARED_MEMORY

LOCK = ROOT / "requirements" / "gpu.lock"
LEAST_DEVICE_BYTES = 12 << 30
"""Device memory that the parts need with the random model: two engines side by side."""
MATRIX = 1024


def run(task: Task, findings: Findings) -> None:
    """Check the machine, and make the models."""
    if task.on_gpu:
        _check_device(findings)
        _check_versions(findings)
    platform_name = "cuda" if task.on_gpu else "cpu"
    findings.check(
        f"vLLM runs on {platform_name}", current_platform.device_type == platform_name, current_platform.device_type
    )
    _check_product(task, findings)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    needed = max(memory_of_pressure(task).tier_bytes, memory_of_contracts(task, "float32").tier_bytes)
    findings.check(
        f"{SHARED_MEMORY} has room for the largest host tier of the parts",
        not task.on_gpu or free > needed,
        f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} GiB needed",
    )
    findings.number("host memory, GiB", round(psutil.virtual_memory().total / 2**30, 1))
    findings.number("CPUs", psutil.cpu_count())
    findings.number("processor", _processor())
    _make_models(task, findings)


def _check_device(findings: Findings) -> None:
    there = findings.check("torch sees a CUDA device", torch.cuda.is_available(), f"torch {torch.__version__}")
    if not there:
        return
    about = torch.cuda.get_device_properties(0)
    findings.number("device", about.name)
    findings.number("device memory, GiB", round(about.total_memory / 2**30, 2))
    findings.number("multiprocessors", about.multi_processor_count)
    findings.number("CUDA of torch", str(torch.version.cuda))
    free, _ = torch.cuda.mem_get_info()
    findings.check(
        "the device has enough free memory",
        free > LEAST_DEVICE_BYTES,
        f"{free / 2**30:.1f} GiB free, {LEAST_DEVICE_BYTES / 2**30:.0f} GiB needed",
    )


def _check_versions(findings: Findings) -> None:
    """Check vLLM's version, and record the packages that differ from the lock."""
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    found = {name: _version(name) for name in locked}
    findings.check("vLLM is the locked version", found["vllm"].startswith(locked["vllm"]), found["vllm"])
    others = [{"package": n, "locked": v, "found": found[n]} for n, v in locked.items() if found[n].split("+")[0] != v]
    findings.number("packages of requirements/gpu.lock with another version", len(others))
    findings.number("other versions", others[:40])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _check_product(task: Task, findings: Findings) -> None:
    """Compare a product of matrices on the device, in 16 bits, with one on the host."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(MATRIX, MATRIX, generator=random).bfloat16() for _ in range(2))
    made = (left.to(task.device) @ right.to(task.device)).float().cpu()
    error = float((made - left.float() @ right.float()).abs().max())
    findings.check("a product of matrices is right", error < MATRIX**0.5 / 16, f"largest error {error:.3f}")


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()


def _make_models(task: Task, findings: Findings) -> None:
    clock = MonotonicClock()
    begun_s = clock.now_s()
    for kind, directory in (("full attention", full_attention(task)), ("sliding window", sliding_window(task))):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        findings.check(
            f"the model with {kind} is there",
            size > 0,
            f"{directory}: {config.get('num_hidden_layers')} layers, {size / 1e9:.2f} GB",
        )
    sizes = sizes_of(task)
    findings.number("parameters of the random model", sizes.parameters)
    findings.number("seconds to make the models", round(clock.now_s() - begun_s, 1))
    findings.number("model", str(task.model or ("small, random" if sizes is SMALL else "random, of TinyLlama's shape")))
