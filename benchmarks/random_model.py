"""Models with random weights that are larger than the built-in one: their steps take most of a benchmark's time."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from replicas.tiny.model import tiny_model_directory

LARGER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
"""What is larger than in the built-in model."""


def write_model(directory: Path, larger: Mapping[str, int] | None = None) -> None:
    """Write the built-in model's tokenizer with a larger configuration.

    vLLM makes up the weights if the engine argument `load_format` is `dummy`.

    Args:
        directory: is created; it must not exist.
        larger: the sizes that differ from the built-in model's, by their names in `config.json`. Default: `LARGER`.
    """
    shutil.copytree(tiny_model_directory(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(larger or LARGER)))
