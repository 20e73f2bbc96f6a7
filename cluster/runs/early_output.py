"""Sends the output of a run's tools to the program's replica while the tools run, in the order of the calls.

The replica computes it into the program's context, so that the next turn has less to compute. It is knowledge and no
duty: whatever fails ends it for this round, and the next turn computes what is missing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.core.clock import Clock
from cluster.runs.events import Call
from cluster.runs.state import RunState
from cluster.runs.turn_request import known_body

logger = logging.getLogger("ray.serve")

INTERVAL_S = 0.1
"""Shortest time in seconds between two messages to the replica."""

LARGEST_SHARE = 0.1
"""Share of the time that messages take at most, because each has the whole conversation."""

RETRY_S = 0.05
"""Seconds to wait where a call has no output, although it has no answer either."""


class EarlyOutput:
    """The output of one round of calls.

    Args:
        calls: the calls in their order, each with its id at the tool runtime.
        state: returns the run's state now.
        output: waits for more output of a call than the given number of characters; see `cluster.runs.task.Tools`.
        extend: sends the next turn's body as far as it is known; see `cluster.runs.task.Replicas`.
        clock: the clock of the intervals.
    """

    def __init__(
        self,
        calls: Sequence[tuple[Call, str]],
        state: Callable[[], RunState],
        output: Callable[[str, int], Awaitable[str | None]],
        extend: Callable[[Mapping[str, Any]], Awaitable[str | None]],
        clock: Clock,
    ) -> None:
        self._calls = calls
        self._state = state
        self._output = output
        self._extend = extend
        self._clock = clock

    async def run(self) -> None:
        """Send output until all calls have answers, or the replica computes no more of it."""
        try:
            for number, (call, call_id) in enumerate(self._calls):
                # The answers of the calls before are complete. They are sent with the first output of this one, or now.
                if not await self._follow(call, call_id, begun=number > 0):
                    return
        except Exception as error:  # noqa: BLE001 - the next turn computes what was not computed early
            logger.warning("output of tools is not computed early: %r", error)

    async def _follow(self, call: Call, call_id: str, *, begun: bool) -> bool:
        """Send the output of one call until it has its answer. Return False if the replica computes no more."""
        text = ""
        while call.place not in self._state().answers:
            if begun:
                if not await self._send(call, text):
                    return False
                if call.place in self._state().answers:
                    break
            begun = True
            more = await self._output(call_id, len(text))
            while more is None and call.place not in self._state().answers:
                await asyncio.sleep(RETRY_S)
                more = await self._output(call_id, len(text))
            text = text if more is None else more
        return True

    async def _send(self, call: Call, text: str) -> bool:
        began_s = self._clock.now_s()
        body = known_body(self._state(), call, text)
        if body is None or await self._extend(body) is not None:
            return False
        took_s = self._clock.now_s() - began_s
        await asyncio.sleep(max(INTERVAL_S, took_s * (1 / LARGEST_SHARE - 1)))
        return True
