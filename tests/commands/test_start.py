"""The command line starts at once: it loads what is heavy only for the command that needs it."""

import subprocess
import sys

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
