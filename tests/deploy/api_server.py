"""What an API server and KubeRay refuse beyond the schema of a kind: names, labels, and lists with a key twice."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

LABEL_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123, as of a namespace."""
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035."""
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
REFERENCES = ("secretName", "claimName", "ingressClassName", "storageClassName", "priorityClassName")
MAX_RAY_SERVICE = 47
"""Characters of a RayService's name (KubeRay's `MaxRayServiceNameLength`)."""


def refusals(document: dict[str, Any]) -> list[str]:
    """Why an API server or KubeRay would refuse an object."""
    kind, name = document["kind"], document["metadata"]["name"]
    place = f"{kind} {name}"
    wanted = SERVICE_NAME if kind in ("Service", "RayService") else SUBDOMAIN
    found = [] if isinstance(name, str) and wanted.fullmatch(name) else [f"{place}: name"]
    if kind == "RayService" and len(str(name)) > MAX_RAY_SERVICE:
        found.append(f"{place}: KubeRay allows {MAX_RAY_SERVICE} characters")
    namespace = document["metadata"].get("namespace")
    if not isinstance(namespace, str) or not LABEL_NAME.fullmatch(namespace):
        found.append(f"{place}: namespace {namespace!r}")
    found += [f"{place}: {problem}" for problem in _walk(document)]
    return found


def _walk(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _walk(part, path)
    elif isinstance(value, dict):
        for key, part in value.items():
            below = f"{path}.{key}"
            if key in ("labels", "matchLabels") and isinstance(part, dict):
                yield from _labels(part, below)
            elif key in REFERENCES and not (isinstance(part, str) and SUBDOMAIN.fullmatch(part)):
                yield f"{below}: {part!r} is no name"
            yield from _walk(part, below)
        if isinstance(containers := value.get("containers"), list):
            yield from _pod(value, containers, path)


def _labels(labels: dict[Any, Any], path: str) -> Iterator[str]:
    for key, text in labels.items():
        if not isinstance(key, str) or not LABEL_KEY.fullmatch(key):
            yield f"{path}: {key!r} is no key"
        if not isinstance(text, str) or not LABEL_VALUE.fullmatch(text):
            yield f"{path}.{key}: {text!r} is no value"


def _pod(spec: dict[str, Any], containers: list[dict[str, Any]], path: str) -> Iterator[str]:
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    yield from _twice(volumes, f"{path}.volumes")
    for container in (*spec.get("initContainers", ()), *containers):
        here = f"{path}.{container['name']}"
        mounts = container.get("volumeMounts", ())
        yield from _twice((entry["name"] for entry in container.get("env", ())), f"{here}.env")
        yield from _twice((mount["mountPath"] for mount in mounts), f"{here}.volumeMounts")
        for mount in mounts:
            # A StatefulSet's claims are volumes, too.
            if mount["name"] not in (*volumes, "data"):
                yield f"{here}: there is no volume {mount['name']}"
        least, most = (container["resources"].get(side, {}) for side in ("requests", "limits"))
        for device in {*least, *most}:
            if "/" in device and least.get(device) != most.get(device):
                yield f"{here}.resources: of {device}, requests and limits differ"


def _twice(names: Iterable[str], path: str) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path}: {name} stands there {count} times"
