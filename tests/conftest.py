"""What all tests share: quiet, offline libraries, and the built-in model."""

import os
from pathlib import Path

# Before vLLM, Ray or a tokenizer is imported: they read their environment once.
os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # One OpenMP thread is five times faster than many on a model this small.
    "OMP_NUM_THREADS": "1",
    # The engine runs in the test's process, and takes 1 GiB for its KV cache unless a test says otherwise.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import pytest
from hypothesis import settings

from cluster.tiny.model import write_tiny_model

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("caesura", deadline=None)
settings.load_profile("caesura")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the built-in model."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory
