"""`/v1/programs`: what programs there are, the story of one, and its end."""

from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

from starlette.responses import JSONResponse, Response

from cluster.errors import BadRequest
from cluster.program import ProgramIdentity
from cluster.program_runner import ProgramRunner
from cluster.run_account import account
from cluster.run_log import RunHead

MOST_LISTED = 1000
"""Runs that a list of programs looks at."""

Story = Callable[[str], Awaitable[dict[str, Any] | None]]
"""What the replica that has a program knows of it, by the program's key."""


class ProgramRoutes:
    """The handlers of the routes on programs.

    Args:
        runner: knows the programs that run on the server.
        story: knows what the replicas know.
    """

    def __init__(self, runner: ProgramRunner, story: Story) -> None:
        self._runner = runner
        self._story = story

    async def list(self, tenant: str, limit: int) -> Response:
        """The programs that ran on the server, those begun last first.

        Raises:
            BadRequest: ``limit`` is not between 1 and `MOST_LISTED`.
        """
        if not 1 <= limit <= MOST_LISTED:
            raise BadRequest(f"limit must be between 1 and {MOST_LISTED}, not {limit}", param="limit")
        runs = await self._runner.runs(tenant, limit=MOST_LISTED)
        first_seen = {run.program: number for number, run in reversed(list(enumerate(runs)))}
        by_program = sorted(runs, key=lambda run: first_seen[run.program])
        programs = [_head(name, list(its)) for name, its in groupby(by_program, lambda run: run.program)]
        return JSONResponse({"object": "list", "data": programs[:limit], "has_more": len(programs) > limit})

    async def show(self, tenant: str, program_id: str, *, token_ids: bool) -> Response:
        """One program: its runs on the server, and what its replica tells of turns, pauses and decisions.

        Raises:
            BadRequest: nobody knows the program.
        """
        heads = await self._runner.runs(tenant, program=program_id)
        logs = [await self._runner.load(head.id, tenant) for head in reversed(heads)]
        runs = [account(log, token_ids=token_ids) for log in logs if log]
        story = await self._story(_key(tenant, program_id))
        if not runs and not story:
            raise BadRequest(f"nobody knows the program {program_id!r}", status=404, param="program_id")
        return JSONResponse({"id": program_id, "object": "program", **(story or {}), "runs": runs})

    async def cancel(self, tenant: str, program_id: str) -> Response:
        """End all open runs of a program.

        Raises:
            BadRequest: it never ran on the server.
        """
        heads = await self._runner.runs(tenant, program=program_id)
        if not heads:
            raise BadRequest(f"no program {program_id!r} runs on the server", status=404, param="program_id")
        cancelled = [head.id for head in heads if head.open and await self._runner.cancel(head.id)]
        return JSONResponse({"id": program_id, "object": "program", "cancelled": cancelled})


def _head(program: str, runs: "list[RunHead]") -> dict[str, Any]:
    newest = runs[0]
    return {
        "id": program,
        "object": "program",
        "created_at": int(min(run.created_s for run in runs)),
        "status": "in_progress" if any(run.open for run in runs) else newest.status,
        "runs": len(runs),
        "last_run": newest.id,
        "model": newest.labels.get("model"),
    }


def _key(tenant: str, program_id: str) -> str:
    return str(ProgramIdentity(program_id, tenant=tenant).key)
