"""Fetches models into the cache, then writes the file for which workers wait. Arguments: that file, models."""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download


def main(done: Path, models: list[str]) -> None:
    """Fetch; again costs a look at each file."""
    for model in models:
        print(f"{model}: {snapshot_download(model)}", flush=True)
    done.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
