"""Reads stored responses from the logs of their runs."""

import asyncio
from collections.abc import Container, Iterable, Sequence

from cluster.core.errors import BadRequest
from cluster.responses.events import ResponseFold
from cluster.runs.events import RunEvent
from cluster.runs.runner import AT_ONCE, ProgramRunner
from cluster.runs.state import begin


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
        spec = begin(log[0]).spec
        if spec.api != "responses" or not (spec.store or response_id in own):
            raise not_found(response_id)
        return log

    async def prolong(self, names: Sequence[str], tenant: str, share: float = 1.0) -> frozenset[str]:
        """Keep responses that have ended, as if they had ended now. Return those that have not ended.

        The arguments are those of `RunStore.prolong`.
        """
        return await self._runner.prolong(tenant, names, share)

    async def found(self, names: Iterable[str], tenant: str, own: Container[str] = ()) -> dict[str, ResponseFold]:
        """Return those of these responses that exist, by id. The arguments are those of `log`."""
        found: dict[str, ResponseFold] = {}
        for name in names:  # one log at a time is in memory
            try:
                found[name] = await replayed(await self.log(name, tenant, own))
            except BadRequest:
                continue
        return found


async def replayed(log: Sequence[RunEvent]) -> ResponseFold:
    """Return a response by its log. Other tasks of the event loop run meanwhile."""
    reader = ResponseFold()
    for number, event in enumerate(log, start=1):
        reader.feed(event)
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
    return reader


def not_found(response_id: str) -> BadRequest:
    """Return the error about a response that does not exist."""
    return BadRequest(f"Response with id {response_id[:256]!r} not found.", status=404, param="response_id")
