"""The list of a tenant's programs: those that clients run, from the replicas, and those that the cluster runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.store.runs.records import RunHead


@dataclass(slots=True)
class ListedProgram:
    """What the replicas and the store of runs know of one program. Times are Unix times in seconds."""

    id: str
    created_s: float
    last_seen_s: float
    """The end of its last turn, now if a turn is in flight, or the start of its newest run."""
    model: str | None = None
    replica: str | None = None
    """The replica that saw it last; None: no replica remembers it."""
    phase: str | None = None
    """Its phase on that replica."""
    turns: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the turns that the replicas remember."""
    cached_tokens: int = 0
    """How many of them needed no computation."""
    runs: list[RunHead] = field(default_factory=list)
    """Its runs in the cluster, the newest first."""

    def to_public_dict(self) -> dict[str, Any]:
        """Return the program's entry in `GET /v1/programs`."""
        newest = self.runs[0] if self.runs else None
        return {
            "id": self.id,
            "object": "program",
            "created_at": int(self.created_s),
            "last_seen_at": int(self.last_seen_s),
            "status": self._status(newest),
            "state": self.phase,
            "turns": self.turns,
            "cached_share": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None,
            "replica": self.replica,
            "runs": len(self.runs),
            "last_run": None if newest is None else newest.id,
            "model": self.model,
        }

    def _status(self, newest: RunHead | None) -> str:
        if newest is None:
            return _STATUS.get(str(self.phase), "paused")
        return "in_progress" if any(run.open for run in self.runs) else newest.status


_STATUS = {"running": "in_progress", "resuming": "in_progress", "deciding": "in_progress", "ended": "completed"}
"""The status of a program that a client runs, by its phase. In all other phases it is paused."""


def merged(
    answers: Iterable[tuple[str, Mapping[str, Any]]], runs: Sequence[RunHead], now_s: float
) -> list[ListedProgram]:
    """Return the programs, the one that was seen last first.

    Args:
        answers: pairs (model, the replica's answer to the operation `sessions`).
        runs: runs of programs in the cluster, the newest first.
        now_s: the current Unix time in seconds.
    """
    found: dict[str, ListedProgram] = {}
    for model, answer in answers:
        for session in answer["sessions"]:
            _add_session(found, session, model, answer["replica"], now_s)
    for run in runs:
        program = found.setdefault(run.program, ListedProgram(run.program, run.created_s, run.created_s))
        program.created_s = min(program.created_s, run.created_s)
        program.last_seen_s = max(program.last_seen_s, run.created_s)
        program.model = program.model or run.labels.get("model")
        program.runs.append(run)
    return sorted(found.values(), key=lambda one: (-one.last_seen_s, one.id))


def _add_session(
    found: dict[str, ListedProgram], session: Mapping[str, Any], model: str, replica: str, now_s: float
) -> None:
    created_s, seen_s = now_s - session["age_s"], now_s - session["idle_s"]
    name = session["program"]
    program = found.setdefault(name, ListedProgram(name, created_s, seen_s))
    if program.replica is None or seen_s > program.last_seen_s:  # it may have moved here from another replica
        program.replica, program.model, program.phase = replica, model, session["phase"]
    program.created_s = min(program.created_s, created_s)
    program.last_seen_s = max(program.last_seen_s, seen_s)
    program.turns += session["turns"]
    program.prompt_tokens += session["prompt_tokens"]
    program.cached_tokens += session["cached_tokens"]
