"""The process of one part: ``python -m benchmarks.gpu_kit.part NAME --device cuda --out FOLDER ...``.

It sets the environment that vLLM and torch read when they are imported, and only then imports the part's module.
"""

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_kit.parts import CPU, CUDA, LIMIT_S, PARTS
from benchmarks.gpu_kit.task import Findings, Task
from replicas.settings import CPU_ENVIRONMENT

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(argv: list[str] | None = None) -> int:
    """Run the part; exit status 1 if a check fails or an error ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    arguments = parser.parse_args(argv)
    part = next(part for part in PARTS if part.name == arguments.name)
    os.environ.update(QUIET | (CPU_ENVIRONMENT if arguments.device == CPU else {}))
    task = Task(
        part.name, arguments.device, arguments.cache, arguments.out, arguments.model, arguments.quick, arguments.limit_s
    )
    findings = Findings(part.files(arguments.out).findings)
    try:
        importlib.import_module(f"benchmarks.gpu_kit.{part.module}").run(task, findings)
    except Exception as error:  # noqa: BLE001 - any error of a part is its result
        traceback.print_exc()
        findings.check("the part runs to its end", False, f"{type(error).__name__}: {error}")
    findings.complete = True
    findings.write()
    return 0 if all(check["passed"] for check in findings.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
