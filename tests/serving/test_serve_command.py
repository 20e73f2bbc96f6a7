"""`caesura serve` that is stopped while it starts; where it is `served`, its start and end in order are checked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster

CONFIG = """
http: {port: 0}
replicas: {count: 1, kv_cache_bytes: 16777216}
engine: {max_model_len: 1024}
"""
CAESURA = str(Path(sys.executable).parent / "caesura")
START_WITHIN_S = 150.0
STOP_WITHIN_S = 60.0
GONE_WITHIN_S = 30.0


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    file = tmp_path / "caesura.yaml"
    file.write_text(CONFIG)
    command = [CAESURA, "serve", "--config", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_WITHIN_S)


def output_until(process: subprocess.Popen[str], end: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if end in line:
            return text
    raise AssertionError(f"it ended without {end!r}:\n{text}")


def test_ctrl_c_during_the_start_leaves_nothing(serving: subprocess.Popen[str]) -> None:
    output_until(serving, "Ray")
    deadline = time.monotonic() + START_WITHIN_S
    family: list[psutil.Process] = []
    while len(family) < 6 and time.monotonic() < deadline:
        family = psutil.Process(serving.pid).children(recursive=True)
        time.sleep(0.2)
    os.killpg(serving.pid, signal.SIGINT)
    serving.wait(STOP_WITHIN_S)
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    assert alive == []


def test_a_container_that_is_stopped_during_its_start_ends_in_order(serving: subprocess.Popen[str]) -> None:
    output_until(serving, "application")  # from here on Ray has had handlers of its own
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(STOP_WITHIN_S) == 0
    assert serving.stdout is not None and "stopped" in serving.stdout.read()


def test_an_unknown_key_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "caesura.yaml"
    file.write_text("model: {sorce: tiny}\n")
    command = [CAESURA, "serve", "--config", str(file)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "model.sorce" in refused.stdout + refused.stderr
