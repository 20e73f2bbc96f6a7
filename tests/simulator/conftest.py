"""A model that is only a configuration, and a small recorded trace."""

import gzip
import json
import random
from pathlib import Path

import pytest

from replicas.virtual_engine import write_config_only_model
from tests.simulator.simulated import Bench


@pytest.fixture(scope="session")
def config_only_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only_model(tmp_path_factory.mktemp("config-only"), 8192)


@pytest.fixture
def bench(config_only_model: Path) -> Bench:
    return Bench(config_only_model)


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve programs of two turns and a tool, as a recorded trace."""
    return write_trace(tmp_path_factory.mktemp("trace") / "small.jsonl.gz", [0.5 + n / 10 for n in range(12)])


@pytest.fixture(scope="session")
def varied_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many programs like these, whose tools all take another time."""
    draw = random.Random(3)
    return write_trace(
        tmp_path_factory.mktemp("trace") / "varied.jsonl.gz", [draw.expovariate(1.0) for _ in range(400)]
    )


def write_trace(path: Path, tool_durations_s: list[float]) -> Path:
    lines: list[str] = []
    for number, seconds in enumerate(tool_durations_s):
        prompt = 200 + number % 12
        first = {"new_prompt_tokens": prompt, "context_tokens": prompt, "output_tokens": 20}
        second = {"new_prompt_tokens": 0, "context_tokens": prompt + 30, "output_tokens": 10}
        tool = {"tool": "ls", "tool_duration_s": seconds, "tool_return_tokens": 10}
        none = {"tool": None, "tool_duration_s": None, "tool_return_tokens": None}
        lines.append(json.dumps({"program_id": f"r{number}", "turns": [first | tool, second | none]}))
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path
