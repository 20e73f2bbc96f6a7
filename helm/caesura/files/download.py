"""Fetches models into the cache, then writes the file for which workers wait. Arguments: that file, models."""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

OTHER_FORMATS = ["original/*"]
"""The weights once more, in their maker's format, which vLLM does not read."""


def main(done: Path, models: list[str]) -> None:
    """Fetch; again costs a look at each file."""
    for model in models:
        print(f"{model}: {snapshot_download(model, ignore_patterns=OTHER_FORMATS)}", flush=True)
    done.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
