"""The list of a tenant's programs, merged from replicas and runs."""

from typing import Any

from cluster.http.program_list import merged
from cluster.store.runs.records import RunHead

NOW_S = 1_000_000.0


def session(program: str, *, age_s: float, idle_s: float, phase: str = "held", turns: int = 1) -> dict[str, Any]:
    tokens = {"prompt_tokens": 100 * turns, "cached_tokens": 75 * turns}
    return {"program": program, "phase": phase, "turns": turns, "age_s": age_s, "idle_s": idle_s, **tokens}


def answer(replica: str, *sessions: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "tiny", {"replica": replica, "sessions": list(sessions)}


def run(run_id: str, program: str, created_s: float, *, open_: bool = False, status: str = "completed") -> RunHead:
    return RunHead(run_id, "default", program, created_s, status, {"model": "large"}, open_, False)


def listed(*arguments: Any) -> list[dict[str, Any]]:
    return [program.to_public_dict() for program in merged(*arguments, NOW_S)]


def test_sessions_of_clients_and_runs_are_one_list_the_last_seen_first() -> None:
    answers = [
        answer("r1", session("old", age_s=90, idle_s=50), session("new", age_s=9, idle_s=5, phase="running", turns=4)),
        answer("r2", session("middle", age_s=40, idle_s=30, phase="ended")),
    ]
    found = listed(answers, [run("resp_1", "ran", NOW_S - 20)])
    assert [one["id"] for one in found] == ["new", "ran", "middle", "old"]
    assert [one["status"] for one in found] == ["in_progress", "completed", "completed", "paused"]
    assert found[0] == {
        "id": "new",
        "object": "program",
        "created_at": int(NOW_S) - 9,
        "last_seen_at": int(NOW_S) - 5,
        "status": "in_progress",
        "state": "running",
        "turns": 4,
        "cached_share": 0.75,
        "replica": "r1",
        "runs": 0,
        "last_run": None,
        "model": "tiny",
    }
    assert (found[1]["state"], found[1]["cached_share"], found[1]["model"]) == (None, None, "large")


def test_a_program_with_runs_that_a_replica_knows_is_one_entry() -> None:
    runs = [run("resp_2", "p", NOW_S - 3, open_=True, status="in_progress"), run("resp_1", "p", NOW_S - 60)]
    [found] = listed([answer("r1", session("p", age_s=59, idle_s=1, turns=2))], runs)
    assert (found["runs"], found["last_run"], found["status"]) == (2, "resp_2", "in_progress")
    assert (found["turns"], found["replica"], found["created_at"]) == (2, "r1", int(NOW_S) - 60)


def test_a_program_that_has_moved_is_shown_where_it_was_seen_last() -> None:
    before = answer("r1", session("p", age_s=60, idle_s=30, phase="ended", turns=3))
    after = answer("r2", session("p", age_s=20, idle_s=2, phase="held", turns=1))
    for answers in ([before, after], [after, before]):
        [found] = listed(answers, [])
        assert (found["replica"], found["state"], found["turns"]) == ("r2", "held", 4)
        assert found["created_at"] == int(NOW_S) - 60
