"""The models of responses on the wire."""

import subprocess
import sys

BUILT = """
from openai.types.responses import Response, ResponseOutputItemDoneEvent
from cluster.responses.output_builder import OutputBuilder
from cluster.responses.wire import build_models
models = (Response, ResponseOutputItemDoneEvent)
print([model.__pydantic_complete__ for model in models])
build_models()
print([model.__pydantic_complete__ for model in models])
"""


def test_models_are_built_before_the_first_response() -> None:
    """In a process of its own, because a model is built once."""
    ran = subprocess.run([sys.executable, "-c", BUILT], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines() == ["[False, False]", "[True, True]"]
