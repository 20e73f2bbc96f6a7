"""The kit for a GPU machine: what is run, resumed, limited and skipped, and what the report says of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kit import __main__ as kit
from benchmarks.gpu_kit import runner
from benchmarks.gpu_kit.parts import CPU, CUDA, PARTS, Part, chosen
from benchmarks.gpu_kit.profiled import device_named
from benchmarks.gpu_kit.report import lines
from benchmarks.gpu_kit.runner import FAILED, PASSED, SKIPPED, Options, Record, run_parts
from benchmarks.gpu_kit.task import Findings
from cluster.core.errors import ConfigError
from replicas.presets import DEVICES

ROOT = Path(__file__).parents[2]
FIRST, SECOND, THIRD = (Part(name, "none", f"Title of {name}") for name in ("environment", "second", "third"))
FACTS = {"code": "c0de", "commit": "1234567", "torch": "2.13.0", "gpu": "H100", "device": CUDA, "quick": "false"}

WRITE = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from benchmarks.gpu_kit.task import Findings
found = Findings(Path({findings!r}))
{body}
found.complete = True
found.write()
"""
PASS = "found.check('it works', True, 'as it should'); found.number('tokens per s', 12.5)"


class Calls:
    """Runs parts whose processes have a given body, and counts them."""

    def __init__(self, out: Path, **bodies: str) -> None:
        self.bodies, self.out, self.ran = bodies, out, list[str]()
        self.again, self.limit_s, self.device = False, 20.0, CUDA

    def command(self, part: Part) -> list[str]:
        self.ran.append(part.name)
        findings = str(part.files(self.out).findings)
        body = self.bodies.get(part.name, PASS)
        return [sys.executable, "-c", WRITE.format(root=str(ROOT), findings=findings, body=body)]

    def __call__(self, *parts: Part, **facts: str) -> list[Record]:
        options = Options(self.device, self.out, self.out, again=self.again, limit_s=self.limit_s)
        self.ran.clear()
        return list(run_parts(parts, options, FACTS | facts, self.command))


def outcomes(records: list[Record]) -> list[tuple[str, str]]:
    return [(record["status"], record["reason"]) for record in records]


def test_what_has_passed_is_not_run_again_until_something_changes(tmp_path: Path) -> None:
    calls = Calls(tmp_path, second="found.check('it works', False, 'it does not')")
    first = calls(FIRST, SECOND, THIRD)
    assert outcomes(first) == [(PASSED, ""), (FAILED, "it works"), (PASSED, "")]
    assert calls.ran == ["environment", "second", "third"]
    calls.bodies.clear()
    second = calls(FIRST, SECOND, THIRD)
    assert calls.ran == ["second"], "what failed is run again"
    assert [record.get("earlier", False) for record in second] == [True, False, True]
    assert second[0]["numbers"] == {"tokens per s": 12.5}
    for changed in ({"code": "other"}, {"gpu": "H200"}, {"torch": "2.14.0"}, {"quick": "true"}, {"model": "/m"}):
        calls(FIRST, SECOND, **changed)
        assert calls.ran == ["environment", "second"], changed
    calls(FIRST, SECOND, model="/m", commit="7654321", absent_of_these="x")
    assert calls.ran == [], "a commit of the same code, with the facts of the last run"
    calls.again = True
    calls(FIRST, model="/m")
    assert calls.ran == ["environment"]


def test_a_part_that_exceeds_its_limit_fails_keeps_its_numbers_and_leaves_no_process(tmp_path: Path) -> None:
    child = "import subprocess, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    calls = Calls(tmp_path, second=f"{PASS}\n{child}print('begun', flush=True)\ntime.sleep(600)")
    calls.limit_s = 4.0
    marks: list[str] = []
    real = runner.end_marked

    def end_marked(mark: str) -> None:
        marks.append(mark)
        assert len(runner.marked(mark)) == (2 if len(marks) == 2 else 0), "the part, and the child in its own session"
        real(mark)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "end_marked", end_marked)
        patch.setattr(runner, "STOP_WITHIN_S", 1.0)
        records = calls(FIRST, SECOND, THIRD)
    assert outcomes(records) == [(PASSED, ""), (FAILED, "it took longer than its limit of 4 s"), (PASSED, "")]
    assert records[1]["numbers"] == {"tokens per s": 12.5}
    assert (tmp_path / "second.log").read_text() == "passed: it works (as it should)\nbegun\n"
    assert [runner.marked(mark) for mark in marks] == [[], [], []]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("raise ValueError('no luck')", (FAILED, "its process ended with status 1: ValueError: no luck")),
        (f"{PASS}; found.write(); import os; os.abort()", (FAILED, "its process ended with status -6: ")),
        (f"{PASS}; found.check('b', False)", (FAILED, "b")),
        ("pass", (FAILED, "it checked nothing")),
        (f"{PASS}; found.complete = True; found.write(); print('late'); sys.exit(3)", (FAILED, "exit status 3: late")),
    ],
)
def test_how_a_part_ends(tmp_path: Path, body: str, outcome: tuple[str, str]) -> None:
    [_, (status, reason)] = outcomes(Calls(tmp_path, second=body)(FIRST, SECOND))
    assert (status, reason[: len(outcome[1])]) == outcome


def test_without_the_environment_the_other_parts_are_skipped(tmp_path: Path) -> None:
    calls = Calls(tmp_path, environment="found.check('a GPU', False)")
    assert outcomes(calls(FIRST, SECOND)) == [(FAILED, "a GPU"), (SKIPPED, "the part 'environment' has failed")]
    assert calls.ran == ["environment"]


def test_without_a_gpu_everything_is_skipped_with_the_reason_and_nothing_is_run(tmp_path: Path) -> None:
    calls = Calls(tmp_path)
    assert set(outcomes(calls(FIRST, SECOND, absent="there is no nvidia-smi"))) == {
        (SKIPPED, "no CUDA GPU: there is no nvidia-smi")
    }
    assert calls.ran == []
    calls.device = CPU
    assert outcomes(calls(FIRST, SECOND, absent="x")) == [(PASSED, ""), (PASSED, "")], "a rehearsal needs none"


def test_parts_are_chosen_by_name_with_the_one_that_they_need() -> None:
    assert [part.name for part in chosen(["profile", "contracts"])] == ["environment", "contracts", "profile"]
    assert chosen([]) == list(PARTS)
    with pytest.raises(ValueError, match="--parts contract: there are environment, contracts,"):
        chosen(["profile", "contract"])
    for part in PARTS:
        assert (ROOT / "benchmarks" / "gpu_kit" / f"{part.module}.py").is_file()


def test_the_report_has_every_part_with_its_reason_checks_and_numbers(tmp_path: Path) -> None:
    rows = "found.number('steps', [{'batch': 1, 'ms': 2.25}, {'batch': 64, 'note': 'a|b'}])"
    calls = Calls(tmp_path, second=f"{PASS}; {rows}", third="found.check('the engine lives', False, 'EngineDead')")
    text = "\n".join(lines(calls(FIRST, SECOND, THIRD), FACTS))
    assert "2 passed, 1 failed, 0 skipped." in text
    assert re.search(r"^\| third \| failed \| \d+ \| the engine lives \|$", text, re.MULTILINE)
    assert "| the engine lives | **failed** | EngineDead |" in text
    assert "| tokens per s | 12.5 |" in text
    assert "| batch | ms | note |\n| --- | --- | --- |\n| 1 | 2.25 |  |\n| 64 |  | a/b |" in text
    assert "| gpu | H100 |" in text
    assert "rehearsal" not in text and "rehearsal" in "\n".join(lines([], FACTS | {"device": CPU}))


def test_the_command_writes_one_report_of_all_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kit, "probed", lambda options: FACTS | {"device": options.device})
    status = {"profile": FAILED}

    def run_some(parts: list[Part], options: Options, facts: dict[str, str]) -> Any:
        for part in parts:
            record = {"part": part.name, "title": part.title, "status": status.get(part.name, PASSED), "reason": ""}
            part.files(options.out).record.parent.mkdir(exist_ok=True)
            part.files(options.out).record.write_text(json.dumps(record | {"facts": facts}))
            yield record

    monkeypatch.setattr(kit, "run_parts", run_some)
    before: Callable[[int, Any], Any] = signal.getsignal(signal.SIGTERM)  # type: ignore[assignment]
    try:
        out = ["--out", str(tmp_path)]
        assert kit.main([*out, "--parts", "profile"]) == 1
        assert kit.main([*out, "--parts", "contracts"]) == 0, (
            "a part of an earlier call has failed, and none of this one"
        )
        with pytest.raises(SystemExit):
            kit.main([*out, "--model", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [(part["part"], part["status"]) for part in found] == [
        ("environment", PASSED),
        ("contracts", PASSED),
        ("profile", FAILED),
    ]


def test_findings_are_written_at_once(tmp_path: Path) -> None:
    found = Findings(tmp_path / "a.findings.json")
    assert not found.check("one", False, "why")
    found.number("tokens", 3)
    content = json.loads(found.path.read_text())
    assert content == {
        "complete": False,
        "checks": [{"check": "one", "passed": False, "detail": "why"}],
        "numbers": {"tokens": 3},
    }


def test_a_gpu_is_known_by_name_and_memory() -> None:
    def named(name: str, gib: float) -> str:
        return device_named(name, int(gib * 2**30))

    assert named("NVIDIA H100 80GB HBM3", 79.2) == "h100"
    assert named("NVIDIA H200", 139.8) == "h200"
    assert named("NVIDIA A100-SXM4-80GB", 79.1) == "a100-80"
    assert named("NVIDIA A100-SXM4-40GB", 39.4) == "a100-40"
    assert named("NVIDIA GeForce RTX 4090", 23.5) == "rtx-4090"
    assert named("NVIDIA B200", 178.4) == "b200"
    assert {"h800", "h100", "h200", "b200", "a100-40", "a100-80", "rtx-4090"} == DEVICES.keys()
    with pytest.raises(ConfigError, match=r"is 'NVIDIA L40S' with 44\.4 GiB"):
        named("NVIDIA L40S", 44.4)
    with pytest.raises(ConfigError):
        named("NVIDIA H100 NVL", 93.1)


def test_the_lock_has_what_a_gpu_machine_needs() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/gpu.lock").read_text(), re.MULTILINE))
    named = re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)$", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE)
    assert len(named) > 10
    for name, version in named:
        assert pins[name.lower().replace("_", "-")] == version
    assert pins["vllm"] == "0.29.0"
    assert pins["torch"] == "2.13.0"


def wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "kit_probe-1.0-py3-none-any.whl", "w") as file:
        file.writestr("kit_probe.py", "")
        file.writestr("kit_probe-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kit-probe\nVersion: 1.0\n")
        file.writestr("kit_probe-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("kit_probe-1.0.dist-info/RECORD", "")


def test_an_environment_is_made_from_a_folder_of_wheels_without_network(tmp_path: Path) -> None:
    """Nothing but the folder's wheel is in it, so that the first part fails for want of a package, with a reason."""
    wheels, out, lock, venv = (tmp_path / name for name in ("wheels", "out", "lock", "venv"))
    wheels.mkdir()
    lock.write_text("kit-probe==1.0\n")
    environment = os.environ | {"WHEELS": str(wheels), "LOCK": str(lock), "GPU_VENV": str(venv)}
    environment |= {"PYTHON": sys.executable, "PIP_FIND_LINKS": str(tmp_path / "elsewhere")}

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "benchmarks/gpu_kit/run.sh", "--out", str(out), "--cache", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    lacking = make("--device", "cpu")
    assert lacking.returncode == 2
    assert f"make gpu: {wheels} lacks a wheel of {lock}" in lacking.stderr
    wheel(wheels)
    made = make("--device", "cpu", "--parts", "contracts")
    assert made.returncode == 1, made.stderr
    assert (venv / "lib" / "python3.11" / "site-packages" / "kit_probe.py").is_file()
    assert re.search(r"^environment +failed: its process ended with status 1: ModuleNotFoundError", made.stdout)
    assert re.search(r"^contracts +skipped: the part 'environment' has failed$", made.stdout, re.MULTILINE)
    begun = venv.stat().st_mtime_ns
    time.sleep(0.01)
    make("--device", "cpu", "--parts", "environment")
    assert venv.stat().st_mtime_ns == begun, "the same lock: the environment is made once"
