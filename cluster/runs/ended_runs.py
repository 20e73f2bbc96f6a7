"""The runs of this process that have ended lately, for callers that are about to follow them."""

import asyncio
from dataclasses import dataclass

from cluster.runs.task import RunTask

KEPT_S = 30.0
"""Seconds for which an ended run stays in memory."""
MAX_BYTES = 64 << 20
"""Maximum memory of the ended runs. Above it, those are forgotten that can be read from the store."""
RUN_BYTES = 8 << 10
"""Approximate memory of a run without its events."""


@dataclass(frozen=True, slots=True)
class _Kept:
    task: RunTask
    bytes: int
    expiry: asyncio.TimerHandle


class EndedRuns:
    """The ended runs that are in memory.

    A run is forgotten after `KEPT_S`. It is forgotten earlier if all of them have more than `MAX_BYTES`: the one that
    ended first is forgotten first. A run that is not stored is not forgotten before its caller follows it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """Approximate memory of all runs."""
        self._runs: dict[str, _Kept] = {}
        """The runs by id, the one that ended first is the first."""

    def get(self, run_id: str) -> RunTask | None:
        """Return a run; None: it is not in memory."""
        kept = self._runs.get(run_id)
        return None if kept is None else kept.task

    def add(self, run_id: str, task: RunTask) -> None:
        """Add a run that has ended here. It needs a running event loop."""
        self.discard(run_id)
        held = RUN_BYTES + task.journal.memory_bytes
        expiry = asyncio.get_running_loop().call_later(KEPT_S, self.discard, run_id)
        self._runs[run_id] = _Kept(task, held, expiry)
        self.bytes += held
        if self.bytes > MAX_BYTES:
            self._make_room()

    def discard(self, run_id: str) -> None:
        """Forget a run, if it is in memory."""
        if (kept := self._runs.pop(run_id, None)) is not None:
            kept.expiry.cancel()
            self.bytes -= kept.bytes

    def _make_room(self) -> None:
        for run_id, kept in list(self._runs.items()):
            if _may_be_forgotten(kept.task):
                self.discard(run_id)
            if self.bytes <= MAX_BYTES:
                return


def _may_be_forgotten(task: RunTask) -> bool:
    """Return whether the store has the run, or its only caller reads it already."""
    journal = task.journal
    is_stored = task.state.spec.store or journal.lost or journal.run.idempotency is not None
    return is_stored or journal.is_followed
