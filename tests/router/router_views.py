"""Replicas and turns for the tests of the router's core."""

from typing import Any

from cluster.core.program import Hints
from cluster.core.replica_snapshot import ReplicaSnapshot, StepCosts, pack_names
from router.decisions import TurnRequest

COSTS = StepCosts(overhead_s=1.5e-3, sequence_s=1e-5, weights_s=6e-3, token_s=3e-5, context_s=5e-8, swap_token_s=3e-6)


def snapshot(replica: str, number: int = 1, **fields: Any) -> ReplicaSnapshot:
    """An idle replica of 100,000 tokens; ``residents`` and the like may be given as keys of programs."""
    values: dict[str, Any] = {
        "model": "m",
        "draining": False,
        "costs": COSTS,
        "kv_tokens": 100_000,
        "free_tokens": 100_000,
        "held_tokens": 0,
        "host_tokens": 0,
        "host_used_tokens": 0,
        "running": 0,
        "waiting": 0,
        "running_tokens": 0,
        "waiting_tokens": 0,
        "output_tokens": 0.0,
        "programs": 0,
        "working_set_tokens": 0.0,
        "working_set_programs": float(fields.get("programs", 0)),
        "active_tokens": fields.get("working_set_tokens", 0.0),
        "active_programs": float(fields.get("programs", 0)),
        "resume_tokens": (),
        "turn_output_tokens": 100.0,
        "turn_new_tokens": 200.0,
        "program_turns": 5.0,
        "pause_s": 1.0,
        **fields,
    }
    for name in ("residents", "on_device", "on_host", "on_disk"):
        if isinstance(values.get(name), (list, tuple, set)):
            values[name] = pack_names(values[name])
    return ReplicaSnapshot(replica, number=number, **values)


def request(key: str, tokens: int = 1000, tenant: str = "a", **fields: Any) -> TurnRequest:
    """A turn; hints by their names."""
    names = Hints.__dataclass_fields__
    hints = Hints(**{name: fields.pop(name) for name in list(fields) if name in names})
    return TurnRequest(key, tenant, tokens, hints=hints, **fields)
