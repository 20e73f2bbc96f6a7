"""Programs that keep the offload path busy: growing contexts, shared prefixes, pauses, cancelled turns, rewritten ones.

All of their contexts together are larger than the device's KV memory and the host tier, so that the tier stays full,
evicts all the time, and copies back what returns.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from vllm.v1.engine.exceptions import EngineDeadError

from benchmarks.gpu_kit.engine import Engine
from cluster.core.errors import ControlRefused, EngineGone
from cluster.core.program import Hints, ProgramIdentity

FIRST_ID, LAST_ID = 16, 1900
"""Range of the random token ids: both random models have them, and most others."""
CANCELLED_AT_ONCE, CANCELLED_LATER, REWRITTEN, ABANDONED = 0.04, 0.04, 0.05, 0.1
"""Shares of the turns that are cancelled before they can be scheduled and while they run, of the contexts of which the
second half is replaced, and of the programs that end without notice."""
LOADED_AHEAD = 0.5
"""Share of the pauses at whose end the scheduler is notified, so that it loads the context before the turn comes."""
TURN_WITHIN_S = 120.0
TOOLS = ("ls", "pytest", "search", "fetch")


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of the load, in tokens and seconds."""

    programs: int
    """Programs at a time."""
    prefix: int
    """Tokens of a system prompt, of which there are four."""
    added: tuple[int, int]
    """Least and most tokens that a turn adds."""
    generated: tuple[int, int]
    longest: int
    """Largest context of a program."""
    turns: int
    """Largest number of turns."""
    pause_s: float
    """Mean of a pause (exponential)."""


@dataclass(slots=True)
class Load:
    """The programs of one engine, and what has come of them."""

    engine: Engine
    plan: Plan
    counts: Counter[str] = field(default_factory=Counter)
    paused: dict[str, list[int]] = field(default_factory=dict)
    """Programs that have not ended, with their contexts; those whose pause began last come last."""
    stuck: list[str] = field(default_factory=list)
    """Turns without an end after `TURN_WITHIN_S`."""
    dead: str = ""
    """The error by which the engine's death was noticed; empty while it lives."""
    stopping: bool = False
    _death: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, name: str, seconds: float) -> None:
        """Run programs for so long, and return when their turns have ended. Return early if the engine dies."""
        self.stopping = False
        self.paused.clear()
        workers = [asyncio.create_task(self._worker(f"{name}-{i}")) for i in range(self.plan.programs)]
        with suppress(TimeoutError):
            await asyncio.wait_for(self._death.wait(), seconds)
        self.stopping = True
        await asyncio.gather(*workers)

    async def _worker(self, name: str) -> None:
        chosen, number = random.Random(name), 0
        while not self.stopping and not self.dead:
            number += 1
            try:
                await self._program(f"{name}-{number}", chosen)
            except (EngineDeadError, EngineGone) as error:
                self.dead = self.dead or f"{type(error).__name__}: {error}"
                self._death.set()

    async def _program(self, name: str, chosen: random.Random) -> None:
        kind = chosen.randrange(4)
        context = [FIRST_ID + (i * 37 + kind * 101) % 1500 for i in range(self.plan.prefix)]
        context += self._tokens(chosen, self.plan.added)
        turns = chosen.randint(2, self.plan.turns)
        for turn in range(turns):
            generated = chosen.randint(*self.plan.generated)
            if len(context) + generated > self.plan.longest or self.stopping:
                break
            last = turn == turns - 1
            identity = ProgramIdentity(program_id=name, last_turn=last, hints=Hints(expected_tool=chosen.choice(TOOLS)))
            tokens = await self._turn(f"{name}-{turn}", context, generated, identity, chosen.random())
            if last:
                self.paused.pop(name, None)
                self.counts["programs completed"] += 1
                return
            context = context + tokens
            if chosen.random() < REWRITTEN:
                context = context[: len(context) // 2] + self._tokens(chosen, self.plan.added)
                self.counts["contexts rewritten"] += 1
            self.paused.pop(name, None)
            self.paused[name] = context
            await self._pause(name, chosen)
            context = context + self._tokens(chosen, self.plan.added)
        if not self.stopping:
            self.paused.pop(name, None)
            if chosen.random() >= ABANDONED:
                await self.engine.channel.call("end", key=f"default/{name}")
                self.counts["programs ended"] += 1

    async def _turn(
        self, request_id: str, context: Sequence[int], generated: int, identity: ProgramIdentity, share: float
    ) -> list[int]:
        """Run a turn, or cancel it; the tokens that it generated, none if it was cancelled."""
        running = asyncio.create_task(self.engine.turn(request_id, context, generated, identity))
        if share < CANCELLED_AT_ONCE + CANCELLED_LATER:
            await asyncio.sleep(0.0 if share < CANCELLED_AT_ONCE else share)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            self.counts["turns cancelled"] += 1
            return []
        try:
            answer = await asyncio.wait_for(running, TURN_WITHIN_S)
        except TimeoutError:
            self.stuck.append(request_id)
            return []
        if len(answer.tokens) != generated:
            self.counts["turns cut short"] += 1
        self.counts["turns completed"] += 1
        self.counts["prompt tokens"] += len(context)
        self.counts["cached tokens"] += answer.cached
        return answer.tokens

    async def _pause(self, name: str, chosen: random.Random) -> None:
        seconds = min(chosen.expovariate(1 / self.plan.pause_s), 10 * self.plan.pause_s)
        await asyncio.sleep(0.0 if self.stopping else seconds)
        if chosen.random() < LOADED_AHEAD and not self.stopping:
            with suppress(ControlRefused):
                await self.engine.channel.call("tool_finished", key=f"default/{name}")
            await asyncio.sleep(0.02)

    def _tokens(self, chosen: random.Random, bounds: tuple[int, int]) -> list[int]:
        return [chosen.randint(FIRST_ID, LAST_ID) for _ in range(chosen.randint(*bounds))]
