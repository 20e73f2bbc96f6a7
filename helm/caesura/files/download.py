"""Fetches models into the cache, then writes the file for which workers wait.

Arguments: that file, and models as REPOSITORY or REPOSITORY@REVISION, with " (no weights)" if only the tokenizer and
the configuration are needed.
"""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

OTHER_FORMATS = ["original/*"]
"""The weights once more, in their maker's format, which vLLM does not read."""
WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]


def main(done: Path, models: list[str]) -> None:
    """Fetch; again costs a look at each file."""
    for model in models:
        name, _, without_weights = model.partition(" ")
        repository, _, revision = name.partition("@")
        ignored = OTHER_FORMATS + (WEIGHTS if without_weights else [])
        path = snapshot_download(repository, revision=revision or None, ignore_patterns=ignored)
        print(f"{model}: {path}", flush=True)
    done.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
