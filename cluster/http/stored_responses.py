"""Reads stored responses from the logs of their runs."""

import asyncio
from collections.abc import Container, Iterable, Sequence

from cluster.core.errors import BadRequest
from cluster.responses.events import ResponseFold
from cluster.runs.events import RunEvent
from cluster.runs.runner import ProgramRunner


class StoredResponses:
    """The stored responses of all tenants.

    Args:
        runner: has the logs.
    """

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner

    async def log(self, response_id: str, tenant: str, own: Container[str] = ()) -> Sequence[RunEvent]:
        """Return the log of a stored response.

        Args:
            response_id: its id.
            tenant: its tenant.
            own: responses that the caller may read even if they are not stored.

        Raises:
            BadRequest: there is no response with this id (404).
        """
        log = await self._runner.load(response_id, tenant)
        if not log:
            raise not_found(response_id)
        spec = replayed(log[:1]).state.spec
        if spec.api != "responses" or not (spec.store or response_id in own):
            raise not_found(response_id)
        return log

    async def found(self, names: Iterable[str], tenant: str, own: Container[str] = ()) -> dict[str, ResponseFold]:
        """Return those of these responses that exist, by id. The arguments are those of `log`."""
        names = list(names)
        logs = await asyncio.gather(*(self.log(name, tenant, own) for name in names), return_exceptions=True)
        found: dict[str, ResponseFold] = {}
        for name, log in zip(names, logs, strict=True):
            if not isinstance(log, BaseException):
                found[name] = replayed(log)
            elif not isinstance(log, BadRequest):
                raise log
        return found


def replayed(log: Sequence[RunEvent]) -> ResponseFold:
    """Return a response by its log."""
    reader = ResponseFold()
    for event in log:
        reader.feed(event)
    return reader


def not_found(response_id: str) -> BadRequest:
    """Return the error about a response that does not exist."""
    return BadRequest(f"Response with id {response_id[:256]!r} not found.", status=404, param="response_id")
