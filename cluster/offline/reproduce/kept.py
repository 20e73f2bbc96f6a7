"""Runs that are kept in a folder, so that an interrupted evaluation goes on, and figures share the runs that are alike.

A run is known by its settings, its trace and the code that simulated it. What is kept of it are the measures of all
figures of all papers.
"""

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cluster.offline.reproduce.plan import PAPERS, Job, paper_of

Spec = Mapping[str, Any] | str
"""A measure, as in a plan."""


class KeptRuns:
    """The runs of one folder, of the code as it is now.

    Args:
        folder: where they are. It is made if it does not exist.
        traces: the folder of the traces.
        code: what `cluster.offline.reproduce.code_state` returns.
    """

    def __init__(self, folder: Path, traces: Path, code: str) -> None:
        self._folder, self._traces, self._code = folder, traces, code
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, job: Job, specs: Mapping[str, Spec]) -> dict[str, Any] | None:
        """Return what was kept of a run if it has all measures of ``specs``, else None."""
        path = self._path(job)
        if not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content if all(named(spec) in content["values"] for spec in specs.values()) else None

    def keep(self, job: Job, content: Mapping[str, Any]) -> None:
        """Keep a run. Another process never sees a part of it."""
        path = self._path(job)
        partial = path.with_suffix(f".{job.figure}.{job.factor}.partial")
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)

    def _path(self, job: Job) -> Path:
        about = {"code": self._code, "settings": dict(job.settings), "seed": job.seed}
        about["trace"] = _digest(self._traces / f"{job.settings['trace']}.jsonl.gz")
        return self._folder / f"{sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]}.json"


def named(spec: Spec) -> str:
    """Return the name under which a measure is kept."""
    return json.dumps(spec, sort_keys=True)


@cache
def all_specs() -> dict[str, Any]:
    """Return the measures of all figures of all papers, by `named`."""
    figures = (figure for paper in PAPERS for figure in paper_of(paper).figures.values())
    return {named(spec): spec for figure in figures for spec in figure.measures.values()}


@cache
def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
