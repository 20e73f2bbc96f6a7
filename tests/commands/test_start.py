"""The command line starts at once: it loads what is heavy only for the command that needs it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "pydantic",
    "yaml",
    "numpy",
    "httpx",
    "aiohttp",
    "matplotlib",
    "jinja2",
    "vllm",
    "ray",
    "torch",
    "transformers",
)


def test_the_list_of_commands_needs_nothing_heavy() -> None:
    program = f"import sys; import cluster.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert loaded == "[]\n"


def caesura(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the command line in a process of its own. Its last line names the engine's modules, if any."""
    program = (
        "import sys; from cluster.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('vllm', 'torch', 'ray') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_one_line_and_a_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = caesura("serve", "--set", f"http.port={port}")
    advice = "end the program that listens there, or set another port"
    line = f"caesura serve: http.port: 127.0.0.1:{port} is in use; {advice}"
    assert (ended.returncode, ended.stdout.splitlines()[:-1], ended.stderr) == (1, [line], "")


@pytest.mark.parametrize("port", ["0", "8000"])
def test_an_address_of_another_machine_is_one_line_and_a_status(port: str) -> None:
    ended = caesura("serve", "--set", "http.host=203.0.113.7", "--set", f"http.port={port}")
    line = f"caesura serve: http.host: 203.0.113.7:{port} cannot be listened on: Cannot assign requested address"
    assert (ended.returncode, ended.stdout.splitlines()[:-1], ended.stderr) == (1, [line], "")


def test_checking_a_configuration_loads_no_engine(tmp_path: Path) -> None:
    file = tmp_path / "caesura.yaml"
    file.write_text("engine: {max_num_seqs: 8, max_model_len: 1024}\n", encoding="utf-8")
    ended = caesura("config", "check", "--config", str(file))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{file} is valid\n[]\n", "")


@pytest.mark.parametrize("given", ["file", "option"])
def test_a_value_of_the_wrong_type_in_engine_is_refused_by_its_key(tmp_path: Path, given: str) -> None:
    file = tmp_path / "caesura.yaml"
    file.write_text(f"engine: {{max_num_seqs: {'many' if given == 'file' else 8}}}\n", encoding="utf-8")
    option = [] if given == "file" else ["--set", "engine.max_num_seqs=many"]
    ended = caesura("config", "check", "--config", str(file), *option)
    assert ended.returncode == 2
    assert "engine.max_num_seqs" in ended.stderr and "many" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout == "[]\n"
