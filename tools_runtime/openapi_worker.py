"""The process that reads an OpenAPI document in YAML, with limits. It has one request and one answer, in JSON."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from cluster.core.errors import ConfigError
from tools_runtime.openapi import find_operation, read_document

MEMORY_BYTES = 64 << 20
MEMORY_PER_BYTE = 128
"""Limit of the memory for the values, in bytes, and what each byte of the text adds to it."""

CPU_S = 5
CPU_S_PER_MIB = 10
"""Limit of the CPU time in seconds, and what each MiB of the text adds to it."""


def main() -> None:
    """Read the request, and answer it."""
    asked = from_json(sys.stdin.buffer.read())
    _limit(len(asked["text"]))
    try:
        text = json.dumps(_found(**asked), default=str)  # JSON has no dates, which YAML has
    except ConfigError as error:
        text = json.dumps({"error": str(error)})
    except (TypeError, ValueError) as error:
        text = json.dumps({"error": f"the OpenAPI operation is not JSON: {str(error)[:200]}"})
    sys.stdout.write(text)


def _found(text: str, operation_id: str, server: str | None, base_url: str | None, same_origin: bool) -> dict[str, Any]:
    found = find_operation(read_document(text), operation_id, server, base_url, same_origin=same_origin)
    return {
        "method": found.method,
        "url": found.url,
        "header_names": sorted(found.header_names),
        "body_name": found.body_name,
        "description": found.description,
        "parameters": found.parameters,
    }


def _limit(size: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: used + MEMORY_BYTES + MEMORY_PER_BYTE * size,
        resource.RLIMIT_CPU: CPU_S + CPU_S_PER_MIB * (size >> 20),
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
