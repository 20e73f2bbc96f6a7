"""The program of a request that a run answers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from cluster.core.lineage import LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.runs.state import RunState


class AttributedRun:
    """A request for a run, as a turn of the program that it belongs to. A program that begins has the run's id.

    Args:
        index: finds the program.
        body: the request's body.
        identity: what the request says of itself.
        prefix: what the run's id begins with.
    """

    def __init__(self, index: LineageIndex, body: Mapping[str, Any], identity: ProgramIdentity, prefix: str) -> None:
        self.run_id = f"{prefix}{uuid4().hex}"
        self.is_run = False
        """Whether a run was started. `run_ended` is then called at its end."""
        self._index = index
        self._turn = index.attribute(identity, body, self.run_id)

    @property
    def identity(self) -> ProgramIdentity:
        """The request's identity, with the program."""
        return self._turn.identity

    def run_ended(self, state: RunState) -> None:
        """Record that the run has ended in this state, or goes on elsewhere."""
        has_failed = state.ended is not None and state.ended.status == "failed"
        self._index.ended(self._turn, served=bool(state.turns) or not has_failed)

    def refused(self) -> None:
        """Record that no run was started."""
        self._index.ended(self._turn, served=False)


@contextmanager
def attributed_run(
    index: LineageIndex, body: Mapping[str, Any], identity: ProgramIdentity, prefix: str
) -> Iterator[AttributedRun]:
    """Find the program of a request. Its turn ends with its run, or here if no run was started.

    The arguments are those of `AttributedRun`.
    """
    turn = AttributedRun(index, body, identity, prefix)
    try:
        yield turn
    finally:
        if not turn.is_run:
            turn.refused()
