"""Copies the rules, the scrape configuration and the dashboards of deploy/ into the chart (`make helm`).

Helm packages real files: it warns at every symbolic link, and other tools do not follow one.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ROOT / "helm" / "caesura" / "files"


def packaged(source: Path = ROOT / "deploy") -> Iterator[tuple[Path, Path]]:
    """Yield each file of deploy/ that the chart needs, with its copy in the chart."""
    named = [
        *sorted(source.glob("grafana/*.json")),
        source / "prometheus/prometheus.yml",
        source / "prometheus/rules.yml",
    ]
    for path in named:
        yield path, FILES / path.relative_to(source)


def main() -> None:
    """Write the copies, and delete those of files that there are no more."""
    for folder in {copy.parent for _, copy in packaged()}:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for path, copy in packaged():
        shutil.copyfile(path, copy)


if __name__ == "__main__":
    main()
