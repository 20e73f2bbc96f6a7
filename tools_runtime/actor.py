"""The pool of Ray actors that run tools, as an ingress sees it: where a call goes, and what becomes of it.

The actors belong to nobody: they are shared by all pools of the same configuration, and outlive each. A call goes to
the actor with the fewest calls of this pool; calls with an idempotency key, and all calls of one program to a `sticky`
tool, go to one actor as long as that lives. A call whose actor dies is run once more elsewhere if its tool is
idempotent; else its outcome is UNKNOWN. Limits of concurrency hold in each actor.

A call whose caller died goes on, and its result is kept under its idempotency key: whoever resumes the caller's work
sends the call again as `resumed`, to any pool.
"""

import asyncio
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayError

from cluster.errors import IntegrityError, ToolRefused
from cluster.tool_config import ToolsConfig, owner_of
from cluster.tools import Outcome, ToolCall, ToolOffer, ToolResult
from tools_runtime.shared_actors import SharedActors

ANSWER_S = 0.05
"""Longer than its deadline a call takes at most, if its actor does not answer at all."""

ASK_S = 2.0
"""Within which an actor says whether it knows a call."""

MAX_STARTED = 65_536
"""Asynchronous calls whose actor is remembered."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the pool needs to know of a call's tool."""

    idempotent: bool
    sticky: bool
    deadline_s: float


class ToolActors:
    """The pool, as its callers see it.

    Args:
        config: which tools there are, and how many actors.
        cpus: Ray CPUs that each actor reserves.
    """

    def __init__(self, config: ToolsConfig, cpus: float = 0.0) -> None:
        self._config = config
        self._actors = SharedActors(config, cpus)
        self._outstanding = [0] * config.actors
        self._started: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._running: dict[tuple[str, str], list[int]] = {}
        """The actors of each call: one, unless it was sent twice."""

    async def ready(self) -> list[int]:
        """The actors' process ids, once all can run tools.

        Raises:
            RayError: one cannot: what its ConfigError says is in the message.
        """
        return await self._actors.ready()

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The call's one outcome; see `ToolExecutor.run`.

        Args:
            call: what to run.
            definitions: the tools that the request brought, as in the configuration.
            resumed: the call may have been sent before, by somebody who died. If an actor knows its idempotency key,
                the answer is that of the first sending; else an idempotent tool is run, and of any other the outcome is
                UNKNOWN.
        """
        settings = self._settings(call.name, definitions or {})
        index = await self._resumed_at(call, settings) if resumed else await self._pick(call, settings)
        result = await self._run_on(index, call, definitions, settings, resumed)
        if result is None and settings.idempotent:
            result = await self._run_on(await self._pick(call, settings), call, definitions, settings, resumed)
        if result is None:
            text = f"unknown: what ran {call.name} died; the tool may have taken effect"
            result = ToolResult(call.id, call.name, Outcome.UNKNOWN, text, statistics_name=call.name)
        return result

    async def run_all(
        self, calls: Sequence[ToolCall], definitions: Mapping[str, Any] | None = None
    ) -> list[ToolResult]:
        """The calls of one turn, together: as long as the slowest, in the order asked."""
        return list(await asyncio.gather(*(self.run(call, definitions) for call in calls)))

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED, whichever pool sent it; False if no such call is under way."""
        index = await self._place(program, call_id)
        if index is None:
            return False
        try:
            return bool(await self._actors[index].cancel.remote(program, call_id))
        except RayActorError:
            return False  # it died, and the call with it

    async def poll(self, program: str, call_id: str) -> ToolResult | None:
        """The answer of an asynchronous call, None while there is none; UNKNOWN if its actor died."""
        return await self._ask("poll", program, call_id)

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The answer of an asynchronous call, when it is there; UNKNOWN if its actor died."""
        result = await self._ask("completion", program, call_id)
        assert result is not None
        return result

    async def offers(self, definitions: Mapping[str, Any] | None = None) -> list[ToolOffer]:
        """The tools that are known now, the configuration's first, then those that a request brings.

        Args:
            definitions: the tools that the request brought; its servers are connected to and listed.

        Raises:
            ToolRefused: those are not allowed, or wrong, or cannot be listed.
            RayError: a configured tool cannot work.
        """
        for _ in range(3):
            index = await self._least_busy()
            self._actors.attend()
            try:
                offers: list[ToolOffer] | str = await self._actors[index].offers.remote(definitions)
            except RayActorError:
                self._actors.revive(index)
                continue
            if isinstance(offers, str):
                raise ToolRefused(offers)
            return offers
        raise ToolRefused("the actors that run tools die; try again later")

    async def aclose(self, *, kill: bool = False) -> None:
        """Attend to the actors no longer; those that no other pool attends to end themselves.

        Args:
            kill: end them now, with the calls of all pools.
        """
        self._actors.close(kill=kill)

    def check_integrity(self) -> None:
        """Nothing is outstanding when nothing runs.

        Raises:
            IntegrityError: not so.
        """
        running = sum(map(len, self._running.values()))
        if sum(self._outstanding) != running or min(self._outstanding) < 0:
            raise IntegrityError(f"{self._outstanding} calls outstanding, but {running} run")

    def _settings(self, tool: str, definitions: Mapping[str, Any]) -> _Settings:
        defined = self._config.defined
        name = owner_of(tool, lambda name: defined[name].kind if name in defined else None)
        if name is not None:
            return _Settings(defined[name].idempotent, defined[name].sticky, defined[name].deadline_s)
        # Of a request's tools only its actor makes sure that they are right.
        theirs = {name: said for name, said in definitions.items() if isinstance(said, dict)}
        name = owner_of(tool, lambda name: theirs[name].get("kind") if name in theirs else None)
        said = theirs[name] if name is not None else {}
        longest_s = self._config.max_request_deadline_s
        return _Settings(said.get("idempotent") is True, said.get("sticky") is True, longest_s)

    def _home(self, call: ToolCall, settings: _Settings) -> int | None:
        """Where all that belongs to this call goes; the same in all pools. None: anywhere."""
        if settings.sticky:
            home = call.program
        elif call.idempotency_key is not None:
            home = f"{call.program}\n{call.name}\n{call.idempotency_key}"
        else:
            return None
        return zlib.crc32(home.encode(errors="replace")) % len(self._actors)

    async def _pick(self, call: ToolCall, settings: _Settings) -> int:
        home = self._home(call, settings)
        return home if home is not None and home in self._actors.living else await self._least_busy()

    async def _least_busy(self) -> int:
        await self._actors.one_living()
        return min(self._actors.living, key=lambda index: self._outstanding[index])

    async def _resumed_at(self, call: ToolCall, settings: _Settings) -> int:
        """Home, unless the call had been sent elsewhere because home was dead then."""
        home = self._home(call, settings)
        elsewhere = await self._who_knows(call, [index for index in self._actors.living if index != home])
        return await self._pick(call, settings) if elsewhere is None else elsewhere

    async def _who_knows(self, call: ToolCall, among: Sequence[int]) -> int | None:
        """The first of these actors that has the call under way or keeps its answer."""
        self._actors.attend()
        asked = {index: asyncio.ensure_future(_awaited(self._actors[index].knows.remote(call))) for index in among}
        if asked:
            await asyncio.wait(asked.values(), timeout=ASK_S)
        knowing = None
        for index, answer in asked.items():
            if not answer.done():
                answer.cancel()
            elif isinstance(answer.exception(), RayActorError):
                self._actors.revive(index)
            elif answer.exception() is None and answer.result() and knowing is None:
                knowing = index
        return knowing

    async def _run_on(
        self, index: int, call: ToolCall, definitions: Mapping[str, Any] | None, settings: _Settings, resumed: bool
    ) -> ToolResult | None:
        """The outcome; None if the actor died."""
        self._actors.attend()
        self._outstanding[index] += 1
        self._running.setdefault(call.key, []).append(index)
        actor, attempt = self._actors[index], uuid.uuid4().hex
        answer = asyncio.ensure_future(_awaited(actor.run.remote(call, definitions, resumed, attempt)))
        gone = asyncio.ensure_future(self._actors.gone(index).wait())
        try:
            either: set[asyncio.Future[Any]] = {answer, gone}
            patience_s = _patience_s(call, settings)
            await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and gone.done():
                return None
            if not answer.done():
                text = f"timeout: {call.name} did not answer, and nor did what runs it; it may have taken effect"
                return ToolResult(call.id, call.name, Outcome.TIMEOUT, text, statistics_name=call.name)
            result: ToolResult = answer.result()
            if result.outcome is Outcome.STARTED:
                self._remember(call.key, index)
            return result
        except RayActorError:
            self._actors.revive(index)
            return None
        except RayError as error:
            return ToolResult(call.id, call.name, Outcome.UNKNOWN, f"unknown: {str(error)[:500]}")
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
                actor.abandon.remote(attempt)
            self._ended(call, index)

    def _ended(self, call: ToolCall, index: int) -> None:
        self._outstanding[index] -= 1
        actors = self._running[call.key]
        actors.remove(index)
        if not actors:
            del self._running[call.key]

    def _remember(self, key: tuple[str, str], index: int) -> None:
        self._started[key] = index
        if len(self._started) > MAX_STARTED:
            self._started.popitem(last=False)

    async def _place(self, program: str, call_id: str) -> int | None:
        """The actor that has a call; None if none says so."""
        key = (program, call_id)
        if running := self._running.get(key):
            return running[-1]
        if key in self._started:
            return self._started[key]
        return await self._who_knows(ToolCall(call_id, "", program=program), self._actors.living)

    async def _ask(self, method: str, program: str, call_id: str) -> ToolResult | None:
        text = "unknown: there is no such call, or what ran it died; the tool may have taken effect"
        lost = ToolResult(call_id, "", Outcome.UNKNOWN, text)
        index = await self._place(program, call_id)
        if index is None:
            return lost
        try:
            result: ToolResult | None = await getattr(self._actors[index], method).remote(program, call_id)
        except RayActorError:
            self._actors.revive(index)
            return lost
        return result


def _patience_s(call: ToolCall, settings: _Settings) -> float:
    longest_s = settings.deadline_s
    return (longest_s if call.deadline_s is None else min(longest_s, max(0.0, call.deadline_s))) + ANSWER_S


async def _awaited(reference: Any) -> Any:
    return await reference
