"""Prometheus' text format, line by line: the families of Caesura and vLLM out of what Ray's nodes export, as one.

Parsing values and labels would take ten times as long and change nothing. vLLM's names have their colon again.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.metrics import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

KEPT = ((b"ray_caesura_", b"caesura_"), (b"ray_vllm_", b"vllm:"))
"""How names begin that are kept, and how they begin then."""

_NOISE = re.compile(rb',(?:otel_scope_[a-z_]+|Version)="[^"]*"')
"""Labels that are the same for all."""


@dataclass(slots=True)
class _Family:
    head: list[bytes] = field(default_factory=list)
    """HELP and TYPE."""
    samples: list[bytes] = field(default_factory=list)


def merged(pages: Iterable[bytes]) -> bytes:
    """The kept families of several nodes' pages, each once, with the samples of all."""
    families: dict[bytes, _Family] = {}
    for page in pages:
        began = {name for name, family in families.items() if family.head}
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                kept = _renamed(line[7:])
                if kept is not None and (name := kept.partition(b" ")[0]) not in began:
                    families.setdefault(name, _Family()).head.append(line[:7] + kept)
            elif line and (kept := _renamed(line)) is not None:
                families.setdefault(_family(kept, families), _Family()).samples.append(kept)
    lines = [line for family in families.values() for line in (*family.head, *family.samples)]
    return _NOISE.sub(b"", b"".join(line + b"\n" for line in lines))


def gauge(metric: Metric, values: Iterable[tuple[str, float]]) -> bytes:
    """A gauge of one label, as text."""
    (label,) = metric.labels
    lines = [f"# HELP {metric.exported} {metric.text}", f"# TYPE {metric.exported} gauge"]
    lines += [f'{metric.exported}{{{label}="{of}"}} {value:g}' for of, value in values]
    return "".join(f"{line}\n" for line in lines).encode()


def _renamed(line: bytes) -> bytes | None:
    """A line that begins with a name, without Ray's prefix; None: it is not kept."""
    for theirs, ours in KEPT:
        if line.startswith(theirs):
            return ours + line[len(theirs) :]
    return None


def _family(sample: bytes, families: dict[bytes, _Family]) -> bytes:
    """The family of a sample: its name, or that of its histogram."""
    name = re.split(rb"[{ ]", sample, maxsplit=1)[0]
    if name in families:
        return name
    for ending in (b"_bucket", b"_count", b"_sum"):
        if name.endswith(ending) and name.removesuffix(ending) in families:
            return name.removesuffix(ending)
    return name
