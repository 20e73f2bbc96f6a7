"""The routes of programs, tools and draining: `/v1/programs`, `/v1/tools`, `/admin/drain`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from time import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from cluster.api.validation import validated
from cluster.auth.keys import Caller, Role
from cluster.core.errors import BadRequest, ReplicaGone
from cluster.core.program import ProgramIdentity
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.durations.table import OVERALL
from cluster.http.program_list import merged
from cluster.http.runs import Offers, described
from cluster.runs.export import account
from cluster.runs.runner import ProgramRunner
from cluster.store.durations import ToolDuration

MOST_LISTED = 1000
"""Maximum number of runs, and of programs of each replica, that are read for a list of programs. A cancellation reads a
program's runs in pages of this number."""

CLASS = ":"
"""The separator between a tool's name and a class of its calls."""


class ProgramRoutes:
    """The handlers of the routes of programs.

    Args:
        runner: has the runs of programs.
        fleet: asks the replicas for programs and their history.
    """

    def __init__(self, runner: ProgramRunner, fleet: ReplicaClients) -> None:
        self._runner = runner
        self._fleet = fleet

    async def list(self, tenant: str, limit: int, after: str | None = None) -> Response:
        """List the programs of a tenant, the one that was seen last first.

        Args:
            tenant: the tenant's name.
            limit: largest number of programs.
            after: the id of the last program of the page before; None: the first page.

        Raises:
            BadRequest: ``limit`` is not between 1 and `MOST_LISTED`, or ``after`` is no program of the list.
        """
        if not 1 <= limit <= MOST_LISTED:
            raise BadRequest(f"limit must be between 1 and {MOST_LISTED}, not {limit}", param="limit")
        runs = await self._runner.runs(tenant, limit=MOST_LISTED)
        answers, missing = await self._fleet.sessions(tenant, MOST_LISTED if after is not None else limit + 1)
        programs = [program.to_public_dict() for program in merged(answers, runs, time())]
        begin = 0
        if after is not None:
            places = (place for place, program in enumerate(programs, 1) if program["id"] == after)
            begin = next(places, -1)
            if begin < 0:
                raise BadRequest(f"the list has no program {after!r} (any more)", param="after")
        page = programs[begin : begin + limit]
        return JSONResponse(
            {
                "object": "list",
                "data": page,
                "has_more": len(programs) > begin + limit,
                "last_id": page[-1]["id"] if page else None,
                "missing_replicas": missing,
            }
        )

    async def show(self, tenant: str, program_id: str, *, token_ids: bool) -> Response:
        """Return a program: its runs in the cluster, and its turns, pauses and decisions from its replica.

        Raises:
            BadRequest: the program is unknown (404).
        """
        heads = await self._runner.runs(tenant, program=program_id)
        accounts = [await self._account(head.id, tenant, token_ids=token_ids) for head in reversed(heads)]
        runs = [run for run in accounts if run is not None]
        story = await self._fleet.story(_key(tenant, program_id))
        if not runs and not story:
            raise BadRequest(f"nobody knows the program {program_id!r}", status=404, param="program_id")
        shown = {"id": program_id, "object": "program", **(story or {}), "runs": runs}
        return await asyncio.to_thread(JSONResponse, shown)

    async def _account(self, run_id: str, tenant: str, *, token_ids: bool) -> dict[str, Any] | None:
        """Return a run as plain values, or None if it is not stored any more. Its log is not kept."""
        log = await self._runner.load(run_id, tenant)
        return await asyncio.to_thread(account, log, token_ids=token_ids) if log else None

    async def cancel(self, tenant: str, program_id: str) -> Response:
        """Cancel all open runs of a program.

        Raises:
            BadRequest: the program has no runs in the cluster (404).
        """
        before: float | None = None
        cancelled: list[str] = []
        while heads := await self._runner.runs(tenant, program=program_id, limit=MOST_LISTED, before=before):
            before = heads[-1].created_s
            cancelled += [head.id for head in heads if head.open and await self._runner.cancel(head.id)]
        if before is None:
            raise BadRequest(f"no program {program_id!r} runs on the server", status=404, param="program_id")
        return JSONResponse({"id": program_id, "object": "program", "cancelled": cancelled})


def _key(tenant: str, program_id: str) -> str:
    return str(ProgramIdentity(program_id, tenant=tenant).key)


class ToolRoutes:
    """The handlers of the routes of tools.

    Args:
        offers: lists the tools.
        durations: lists the run times and queue times of tools.
    """

    def __init__(self, offers: Offers, durations: Callable[[], Sequence[ToolDuration]]) -> None:
        self._offers = offers
        self._durations = durations

    async def list(self, caller: Caller) -> Response:
        """List the registered tools that the caller's tenant may use, each with its durations.

        `overall` has the durations of all calls. Administrators also see the durations by class of call, because the
        classes are words of the arguments of all tenants.

        Raises:
            Overloaded: the tool runtime does not answer.
        """
        offered = await self._offers(caller.tenant, None)
        classes = caller.may(Role.ADMIN)
        known = self._durations()
        data = [
            {
                **described(one),
                "object": "tool",
                "owner": one.label,
                "read_only": one.read_only,
                "unusable": one.unusable,
                "durations": [_public(each) for each in known if _belongs(each.name, one.name, classes=classes)],
            }
            for one in offered
        ]
        overall = next((_public(each) for each in known if each.name == OVERALL), None)
        return JSONResponse({"object": "list", "data": data, "overall": overall})


def _belongs(known_as: str, tool: str, *, classes: bool) -> bool:
    return known_as == tool or (classes and known_as.startswith(tool + CLASS))


def _public(duration: ToolDuration) -> dict[str, Any]:
    fields = asdict(duration)
    return {"name": fields.pop("name") or None, **fields}


class DrainRequest(BaseModel):
    """The body of `POST /admin/drain`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    replica: str = Field(min_length=1, max_length=256)
    drain: bool = True


async def drain(fleet: ReplicaClients, body: Mapping[str, Any]) -> Response:
    """Begin or end the draining of a replica, which gets no new programs, and whose programs migrate at their next
    pause.

    Raises:
        BadRequest: there is no such replica, or the router is Ray's own, which cannot drain a replica.
    """
    request = validated(DrainRequest, body)
    if not fleet.ours:
        raise BadRequest("this router places no programs, so that none can leave; see router.name")
    try:
        await fleet.to(request.replica, "drain", request.drain)
    except ReplicaGone as error:
        raise BadRequest(str(error), status=HTTPStatus.NOT_FOUND, param="replica") from error
    return JSONResponse({"replica": request.replica, "draining": request.drain})
