"""What a server reports, as the routes of a real one have it."""

from typing import Any

from cluster.offline.live_view.look import Look

MODEL = (("model", "tiny"), ("tenant", "default"))


def replica(name: str = "replica-a", **more: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "replica": name,
        "policy": "caesura",
        "draining": False,
        "block_size": 16,
        "total_blocks": 100,
        "free_blocks": 40,
        "cached_blocks": 30,
        "held_blocks": 20,
        "host_used_tokens": 50,
        "host_tokens": 200,
        "running": 3,
        "waiting": 1,
        "programs": 9,
        "step_time_ratio": 1.25,
        "kv_retention_decisions": {"hold": {"pays": 10, "free": 2}, "swap": {}, "release": {"does not pay": 4}},
    }
    return answers | more


def look(at_s: float = 0.0, *replicas: dict[str, Any], good: float | None = None, **answers: Any) -> Look:
    """``good``: programs that met their SLO so far, of twice as many that ended; None: no metrics."""
    samples = {}
    if good is not None:
        samples = {
            ("caesura_program_ends_total", (*MODEL, ("verdict", "good"))): good,
            ("caesura_program_ends_total", (*MODEL, ("verdict", "late"))): good,
            ("caesura_programs_total", MODEL): 3 * good,
            ("caesura_good_requests_total", MODEL): 5 * good,
            ("caesura_requests_total", (*MODEL, ("outcome", "ok"))): 6 * good,
            ("caesura_routing_decisions_total", (("WorkerId", "a"), *MODEL[:1], ("reason", "home"))): at_s,
            ("caesura_routing_decisions_total", (("WorkerId", "b"), *MODEL[:1], ("reason", "home"))): 3 * at_s,
            ("caesura_waiting_turns", (("WorkerId", "a"), *MODEL[:1])): 2.0,
            ("caesura_waiting_turns", (("WorkerId", "b"), *MODEL[:1])): 3.0,
            ("caesura_program_migrations_total", MODEL[:1]): 1.0,
            ("caesura_requests_rejected_total", (*MODEL[:1], ("reason", "too_late"))): 3.0,
        }
    store = {"healthy": True, "failures": {"timeout": 0}}
    router = {"store": store}
    base: dict[str, Any] = {
        "health": {"status": "alive"},
        "ready": {"status": "ready"},
        "version": {"caesura": "0.1.0", "vllm": "0.29.0", "ray": "2.60.0"},
        "models": {"data": [{"id": "tiny"}]},
        "programs": {"data": [{"id": "prog-1", "status": "in_progress", "runs": 2, "model": "tiny"}]},
        "statistics": {"replicas": list(replicas) or [replica()]},
        "router": {"models": {"tiny": router}},
        "predictor": {"mode": "statistics", "answered": {"service": 0, "local": 7}},
    }
    return Look(at_s, base | answers, {}, samples)


def without(seen: Look, **errors: str) -> Look:
    """The same where some routes return errors."""
    answers = {name: value for name, value in seen.answers.items() if name not in errors}
    return Look(seen.at_s, answers, errors, seen.samples)
