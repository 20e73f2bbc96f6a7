"""Snapshots for tests."""

from typing import Any

from cluster.routing import ReplicaSnapshot, StepCosts

COSTS = StepCosts(overhead_s=0.001, sequence_s=0.0001, weights_s=0.01, token_s=1e-5, context_s=1e-8, swap_token_s=1e-6)


def snapshot(replica: str, number: int, **changes: Any) -> ReplicaSnapshot:
    """Of a replica at rest."""
    fields: dict[str, Any] = {
        "replica": replica,
        "model": "tiny",
        "number": number,
        "draining": False,
        "costs": COSTS,
        "kv_tokens": 10_000,
        "free_tokens": 10_000,
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
        "resume_tokens": (),
        "turn_output_tokens": 100.0,
        "turn_new_tokens": 100.0,
        "program_turns": 4.0,
        "pause_s": 1.0,
    }
    return ReplicaSnapshot(**(fields | changes))
