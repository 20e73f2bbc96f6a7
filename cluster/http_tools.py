"""`/v1/tools`: the tools that are registered, and what is known of their durations."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from starlette.responses import JSONResponse, Response

from cluster.errors import Overloaded, ToolRefused
from cluster.http_errors import RETRY_AFTER_S
from cluster.http_runs import Offers, described
from cluster.statistics import OVERALL
from cluster.tool_durations import ToolDuration

CLASS = ":"
"""Between a tool's name and a class of its calls."""


class ToolRoutes:
    """The handlers of the routes on tools.

    Args:
        offers: knows the tools.
        durations: knows how long they take.
    """

    def __init__(self, offers: Offers, durations: Callable[[], Sequence[ToolDuration]]) -> None:
        self._offers = offers
        self._durations = durations

    async def list(self, tenant: str) -> Response:
        """The registered tools that a tenant may use, each with its durations by class of call; and those of all calls,
        in `overall`.

        Raises:
            Overloaded: nobody can say now which there are.
        """
        try:
            offered = await self._offers(tenant, None)
        except ToolRefused as error:
            raise Overloaded(str(error), retry_after_s=RETRY_AFTER_S) from error
        known = self._durations()
        data = [
            {
                **described(one),
                "object": "tool",
                "owner": one.owner,
                "read_only": one.read_only,
                "durations": [_told(each) for each in known if _belongs(each.name, one.name)],
            }
            for one in offered
        ]
        overall = next((_told(each) for each in known if each.name == OVERALL), None)
        return JSONResponse({"object": "list", "data": data, "overall": overall})


def _belongs(known_as: str, tool: str) -> bool:
    return known_as == tool or known_as.startswith(tool + CLASS)


def _told(duration: ToolDuration) -> dict[str, Any]:
    told = asdict(duration)
    return {"name": told.pop("name") or None, **told}
