"""A model that is only a configuration, and a small recorded trace."""

import gzip
import json
from pathlib import Path

import pytest
from simulated import Bench

from replicas.virtual_engine import write_config_only_model


@pytest.fixture(scope="session")
def config_only_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only_model(tmp_path_factory.mktemp("config-only"), 8192)


@pytest.fixture
def bench(config_only_model: Path) -> Bench:
    return Bench(config_only_model)


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve programs of two turns and a tool, as a recorded trace."""
    path = tmp_path_factory.mktemp("trace") / "small.jsonl.gz"
    lines: list[str] = []
    for number in range(12):
        first = {"new_prompt_tokens": 200 + number, "context_tokens": 200 + number, "output_tokens": 20}
        second = {"new_prompt_tokens": 0, "context_tokens": 230 + number, "output_tokens": 10}
        tool = {"tool": "ls", "tool_duration_s": 0.5 + number / 10, "tool_return_tokens": 10}
        none = {"tool": None, "tool_duration_s": None, "tool_return_tokens": None}
        lines.append(json.dumps({"program_id": f"r{number}", "turns": [first | tool, second | none]}))
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path
