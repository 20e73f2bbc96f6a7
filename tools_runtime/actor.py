"""The pool of Ray actors that run tools, as an ingress sees it: it chooses an actor for each call.

The actors are detached: all pools of the same configuration share them, and they outlive each pool. A call goes to the
actor with the fewest calls of this pool. Calls with an idempotency key, and all calls of one program to a `sticky`
tool, go to the same actor as long as it lives. A call whose actor dies is run once more on another actor if its tool is
idempotent; otherwise its outcome is UNKNOWN. Limits of concurrency hold in each actor.

A call whose caller died goes on, and its result is kept under its idempotency key. Whoever resumes the caller's work
sends the call again as `resumed`, to any pool.
"""

import asyncio
import hashlib
import json
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.config.tools import ToolsConfig, ToolSection
from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import IntegrityError, ToolFailed, ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolOffer, ToolResult, ToolSource
from tools_runtime.actor_process import LOOKS, ToolActor
from tools_runtime.kept_results import key_of

# --- the shared actors ------------------------------------------------------------------------------------------------

MAX_CONCURRENT_CALLS = 10_000
"""Largest number of concurrent calls of one actor. The tools' own limits are reached before."""

LONGEST_PERIOD_S = 5.0
"""Longest time in seconds between two `attend` calls of a pool to an actor."""

FIRST_WAITS_S = (0.1, 0.3, 1.0, 2.0, 4.0)
"""Seconds to wait before each retry of an actor that does not start, when a pool begins."""

AGAIN_S = (0.1, 2.0)
"""First and longest wait in seconds before a dead actor is tried again."""


class SharedActors:
    """One pool's view of the actors.

    Args:
        config: the tools, and the number of actors.
        cpus: Ray CPUs that each actor reserves.
    """

    def __init__(self, config: ToolsConfig, cpus: float) -> None:
        self._text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        self._cpus = cpus
        self._period_s = min(LONGEST_PERIOD_S, config.unattended_s / LOOKS)
        self._handles = [self._found(index) for index in range(config.actors)]
        self._gone = [asyncio.Event() for _ in self._handles]
        """One event per actor. It is set when the actor's process is gone; the actor's successor gets a new one."""
        self._attending: list[asyncio.Task[None]] = []
        self._watching: dict[int, asyncio.Task[None]] = {}
        self._reviving: dict[int, asyncio.Task[None]] = {}
        """Actors that died, each with the task that waits until it is back."""

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, index: int) -> Any:
        """Return the actor's current handle."""
        return self._handles[index]

    @property
    def living(self) -> list[int]:
        """Indices of the actors that are not known to be dead."""
        return [index for index in range(len(self)) if index not in self._reviving]

    def gone(self, index: int) -> asyncio.Event:
        """Return the event that is set when the actor's current process is gone."""
        return self._gone[index]

    def attend(self) -> None:
        """Begin to signal the actors periodically that they are needed. Further calls do nothing."""
        if not self._attending:
            self._attending = [asyncio.create_task(self._attend(index)) for index in range(len(self))]

    async def ready(self) -> list[int]:
        """Return the actors' process ids once all of them can run tools.

        Raises:
            RayError: an actor cannot. The message has the text of its ConfigError.
        """
        self.attend()
        pids = await asyncio.gather(*(self._started(index) for index in range(len(self))))
        for index in range(len(self)):
            self._watch(index)
        return list(pids)

    async def one_living(self) -> None:
        """Wait until one actor is not known to be dead."""
        while not self.living:
            await asyncio.wait(self._reviving.values(), return_when=asyncio.FIRST_COMPLETED)

    def revive(self, index: int) -> None:
        """Mark the actor's process as gone, and wait in the background for the next one."""
        if index in self._reviving:
            return
        self._gone[index].set()
        self._gone[index] = asyncio.Event()
        self._reviving[index] = asyncio.create_task(self._until_ready(index))

    def close(self, *, kill: bool) -> None:
        """Stop attending. ``kill`` ends the actors, even if other pools use them."""
        for task in (*self._attending, *self._reviving.values(), *self._watching.values()):
            task.cancel()
        if kill:
            for actor in self._handles:
                ray.kill(actor)

    def _found(self, index: int) -> Any:
        digest = hashlib.sha256(self._text.encode()).hexdigest()[:24]
        options = ray.remote(ToolActor).options(
            name=f"caesura-tools-{digest}-{index}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=self._cpus,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=MAX_CONCURRENT_CALLS,
            enable_task_events=False,  # as Serve's actors: otherwise the GCS would record each call
        )
        return options.remote(self._text)

    async def _renew(self, index: int) -> None:
        self._handles[index] = await asyncio.to_thread(self._found, index)

    async def _started(self, index: int) -> int:
        for wait_s in FIRST_WAITS_S:
            try:
                return int(await self._handles[index].ready.remote())
            except RayActorError:  # it was about to leave, or is starting again
                await asyncio.sleep(wait_s)
                await self._renew(index)
        return int(await self._handles[index].ready.remote())

    async def _attend(self, index: int) -> None:
        while True:
            if index not in self._reviving:
                try:
                    await self._handles[index].attend.remote()
                except RayActorError:
                    self.revive(index)
            await asyncio.sleep(self._period_s)

    def _watch(self, index: int) -> None:
        if index not in self._watching:
            self._watching[index] = asyncio.create_task(self._until_gone(index))

    async def _until_gone(self, index: int) -> None:
        try:
            address = await self._handles[index].door.remote()
            if not await _held(*address):
                return  # the network forbids it; Ray will report the death
            while await _held(*address):
                pass  # only the connection broke
            self.revive(index)
        except RayActorError:
            self.revive(index)
        finally:
            del self._watching[index]

    async def _until_ready(self, index: int) -> None:
        wait_s, longest_s = AGAIN_S
        try:
            while True:
                try:
                    await self._handles[index].ready.remote(opened=False)
                    self._watch(index)
                    return
                except RayActorError:
                    await asyncio.sleep(wait_s)  # Ray is starting it again, unless it has left
                    wait_s = min(wait_s * 1.5, longest_s)
                    await self._renew(index)
                except RayError:
                    return  # it is back, but its tools cannot work: its calls report why
        finally:
            del self._reviving[index]


async def _held(host: str, port: int) -> bool:
    """Keep a connection open until it ends. Return False if it could not be opened."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        await reader.read(1)
    except OSError:
        pass
    finally:
        writer.close()
    return True


# --- the pool ---------------------------------------------------------------------------------------------------------

ANSWER_S = 0.05
"""Seconds after a call's deadline within which it ends, if its actor does not answer at all."""

ASK_S = 2.0
"""Seconds within which an actor has to answer whether it knows a call, and to cancel one or return its kept result."""

UNSAID_DEADLINE_S: float = ToolSection.model_fields["deadline_s"].default
"""The deadline in seconds of a tool of a request that says none."""

LISTING_S = 30.0
"""Longest time in seconds for which a listing of the tools waits for the actors, beside the time that the servers of a
request may take."""

MAX_STARTED = 65_536
"""Largest number of asynchronous calls whose actor is remembered."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The properties of a call's tool that the pool needs."""

    idempotent: bool
    sticky: bool
    deadline_s: float
    """Largest number of seconds that a call takes."""


class ToolActors:
    """The pool for its callers.

    Args:
        config: the tools, and the number of actors.
        cpus: Ray CPUs that each actor reserves.
        clock: measures what is left of a call's deadline. None is the machine's.
    """

    def __init__(self, config: ToolsConfig, cpus: float = 0.0, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._actors = SharedActors(config, cpus)
        self._outstanding = [0] * config.actors
        self._longest_s = max((config.max_request_deadline_s, *(tool.deadline_s for tool in config.defined.values())))
        self._started: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        """The actor of each asynchronous call, and its deadline on the clock."""
        self._running: dict[tuple[str, str], list[int]] = {}
        """The actors of each call. There is one, unless the call was sent twice."""

    async def ready(self) -> list[int]:
        """Return the actors' process ids once all of them can run tools.

        Raises:
            RayError: an actor cannot. The message has the text of its ConfigError.
        """
        return await self._actors.ready()

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """Run a call and return its one outcome; see `ToolExecutor.run`.

        Its deadline covers the wait for an actor, and a second run where the first actor died.

        Args:
            call: the call to run.
            definitions: the tools that the request brought, as in the configuration.
            resumed: whether a caller that died may have sent the call before. If an actor knows its idempotency key,
                the result is that of the first sending. Otherwise an idempotent tool is run, and any other outcome is
                UNKNOWN.
        """
        settings = self._settings(call, definitions or {})
        limit_s = _limit_s(call, settings)
        until_s = self._clock.now_s() + limit_s
        for sent in range(2 if settings.idempotent else 1):
            index = await self._picked(call, settings, until_s, resumed=resumed and not sent)
            if index is None:
                effect = "it may have taken effect" if sent or resumed else "it was never started"
                text = f"timeout: there was no process that could run {call.name}; {effect}"
                return ToolResult(call.id, call.name, Outcome.TIMEOUT, text, statistics_name=call.name)
            left_s = max(0.0, until_s - self._clock.now_s())
            # The actor measures the call's deadline from when the call arrives.
            rest = replace(call, deadline_s=round(left_s, 2)) if left_s < limit_s - ANSWER_S else call
            result = await self._run_on(index, rest, definitions, left_s, resumed)
            if result is not None:
                return result
        text = f"unknown: what ran {call.name} died; the tool may have taken effect"
        return ToolResult(call.id, call.name, Outcome.UNKNOWN, text, statistics_name=call.name)

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED, whichever pool sent it. Return False if no such call is in progress.

        An actor that does not answer within `ASK_S` ends the call as soon as it works again.
        """
        index = await self._place(program, call_id)
        if index is None:
            return False
        try:
            async with asyncio.timeout(ASK_S):
                return bool(await _awaited(self._actors[index].cancel.remote(program, call_id)))
        except RayActorError:
            return False  # it died, and the call with it
        except (RayError, TimeoutError):
            return True  # whatever became of it, nobody waits for its answer

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Wait for the result of an asynchronous call. The outcome is UNKNOWN if its actor died.

        It is TIMEOUT if the actor has not answered by the call's deadline, or for the longest deadline of all tools if
        another pool sent the call.
        """
        index = await self._place(program, call_id)
        if index is None:
            return _lost(call_id)
        now_s = self._clock.now_s()
        _, until_s = self._started.get((program, call_id), (index, now_s + self._longest_s))
        try:
            async with asyncio.timeout(max(0.0, until_s - now_s) + ASK_S):
                result: ToolResult = await _awaited(self._actors[index].completion.remote(program, call_id))
        except TimeoutError:
            text = "timeout: what runs the call did not answer; the tool may have taken effect"
            return ToolResult(call_id, "", Outcome.TIMEOUT, text)
        except RayActorError:
            self._actors.revive(index)
            return _lost(call_id)
        except RayError as error:
            return ToolResult(call_id, "", Outcome.UNKNOWN, f"unknown: {str(error)[:500]}")
        return result

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """Wait for more output of a call that this pool runs than ``known`` characters; see `ToolExecutor.output`.

        Return None if the call has ended, or its actor does not know it yet or died.
        """
        if not (running := self._running.get((program, call_id))):
            return None
        try:
            output: str | None = await self._actors[running[-1]].output.remote(program, call_id, known)
        except RayError:
            return None
        return output

    async def offers(self, definitions: Mapping[str, Any] | None = None, tenant: str = "") -> list[ToolOffer]:
        """Return the tools that are known now: the configuration's first, then those that a request brings.

        Args:
            definitions: the tools that the request brought. Their servers are connected to and listed.
            tenant: whose request it is.

        Raises:
            ToolRefused: the request's tools are not allowed, not valid, or cannot be listed.
            ToolFailed: no actor answers.
            RayError: a configured tool cannot work.
        """
        limit_s = LISTING_S + (self._config.max_request_deadline_s if definitions else 0.0)
        try:
            async with asyncio.timeout(limit_s):
                return await self._listed(definitions, tenant)
        except TimeoutError:
            raise ToolFailed("the processes that run tools do not answer; try again later", transient=True) from None

    async def aclose(self, *, kill: bool = False) -> None:
        """Stop attending to the actors. Actors to which no pool attends end themselves.

        Args:
            kill: whether to end the actors now, with the calls of all pools.
        """
        self._actors.close(kill=kill)

    def check_integrity(self) -> None:
        """Check that nothing is outstanding when nothing runs.

        Raises:
            IntegrityError: the counts differ.
        """
        running = sum(map(len, self._running.values()))
        if sum(self._outstanding) != running or min(self._outstanding) < 0:
            raise IntegrityError(f"{self._outstanding} calls outstanding, but {running} run")

    async def _listed(self, definitions: Mapping[str, Any] | None, tenant: str) -> list[ToolOffer]:
        for _ in range(3):
            index = await self._least_busy()
            self._actors.attend()
            try:
                offers: list[ToolOffer] | str = await self._actors[index].offers.remote(definitions, tenant)
            except RayActorError:
                self._actors.revive(index)
                continue
            if isinstance(offers, str):
                raise ToolRefused(offers)
            return offers
        raise ToolFailed("the processes that run tools die; try again later", transient=True)

    def _settings(self, call: ToolCall, definitions: Mapping[str, Any]) -> _Settings:
        target = call.target
        if target.source is ToolSource.OPERATOR:
            defined = self._config.defined.get(target.entry)
            if defined is None:  # the actor refuses it
                return _Settings(False, False, self._config.max_request_deadline_s)
            return _Settings(defined.idempotent, defined.sticky, defined.deadline_s)
        # Of a request's tools only its actor makes sure that they are right.
        theirs = definitions.get(target.entry)
        theirs = theirs if isinstance(theirs, dict) else {}
        deadline_s = self._config.max_request_deadline_s
        if isinstance(said_s := theirs.get("deadline_s", UNSAID_DEADLINE_S), int | float) and said_s > 0:
            deadline_s = min(deadline_s, said_s)
        return _Settings(theirs.get("idempotent") is True, theirs.get("sticky") is True, deadline_s)

    def _home(self, call: ToolCall, settings: _Settings) -> int | None:
        """Return the actor for this call, the same in all pools. None: any actor will do."""
        key = key_of(call)
        if not settings.sticky and key is None:
            return None
        home = call.program if settings.sticky or key is None else repr(key)
        return zlib.crc32(home.encode(errors="replace")) % len(self._actors)

    async def _picked(self, call: ToolCall, settings: _Settings, until_s: float, *, resumed: bool) -> int | None:
        """Return the actor for a call, or None if there is none before ``until_s``."""
        try:
            async with asyncio.timeout(max(0.0, until_s - self._clock.now_s())):
                return await (self._resumed_at if resumed else self._pick)(call, settings)
        except TimeoutError:
            return None

    async def _pick(self, call: ToolCall, settings: _Settings) -> int:
        home = self._home(call, settings)
        return home if home is not None and home in self._actors.living else await self._least_busy()

    async def _least_busy(self) -> int:
        await self._actors.one_living()
        return min(self._actors.living, key=lambda index: self._outstanding[index])

    async def _resumed_at(self, call: ToolCall, settings: _Settings) -> int:
        """Return the actor for a resumed call: its home, unless the call was sent elsewhere while its home was dead."""
        home = self._home(call, settings)
        elsewhere = await self._who_knows(call, [index for index in self._actors.living if index != home])
        return await self._pick(call, settings) if elsewhere is None else elsewhere

    async def _who_knows(self, call: ToolCall, among: Sequence[int]) -> int | None:
        """Return the first of these actors that runs the call or keeps its result, or None."""
        self._actors.attend()
        asked = {index: asyncio.ensure_future(_awaited(self._actors[index].knows.remote(call))) for index in among}
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ASK_S)
        finally:
            for answer in asked.values():
                answer.cancel()
        knowing = None
        for index, answer in asked.items():
            if not answer.done():
                continue
            if isinstance(answer.exception(), RayActorError):
                self._actors.revive(index)
            elif answer.exception() is None and answer.result() and knowing is None:
                knowing = index
        return knowing

    async def _run_on(
        self, index: int, call: ToolCall, definitions: Mapping[str, Any] | None, left_s: float, resumed: bool
    ) -> ToolResult | None:
        """Run the call on an actor. Return its outcome, or None if the actor died."""
        until_s = self._clock.now_s() + left_s
        self._actors.attend()
        self._outstanding[index] += 1
        self._running.setdefault(call.key, []).append(index)
        actor, attempt = self._actors[index], uuid.uuid4().hex
        answer = asyncio.ensure_future(_awaited(actor.run.remote(call, definitions, resumed, attempt)))
        gone = asyncio.ensure_future(self._actors.gone(index).wait())
        try:
            either: set[asyncio.Future[Any]] = {answer, gone}
            await asyncio.wait(either, timeout=left_s + ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and gone.done():
                return None
            if not answer.done():
                text = f"timeout: {call.name} did not answer, and nor did what runs it; it may have taken effect"
                return ToolResult(call.id, call.name, Outcome.TIMEOUT, text, statistics_name=call.name)
            result: ToolResult = answer.result()
            if result.outcome is Outcome.STARTED:
                self._remember(call.key, index, until_s)
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

    def _remember(self, key: tuple[str, str], index: int, until_s: float) -> None:
        self._started[key] = index, until_s
        if len(self._started) > MAX_STARTED:
            self._started.popitem(last=False)

    async def _place(self, program: str, call_id: str) -> int | None:
        """Return the actor that has a call, or None if no actor knows it."""
        key = (program, call_id)
        if running := self._running.get(key):
            return running[-1]
        if key in self._started:
            return self._started[key][0]
        return await self._who_knows(ToolCall(call_id, "", program=program), self._actors.living)


def _lost(call_id: str) -> ToolResult:
    text = "unknown: there is no such call, or what ran it died; the tool may have taken effect"
    return ToolResult(call_id, "", Outcome.UNKNOWN, text)


def _limit_s(call: ToolCall, settings: _Settings) -> float:
    longest_s = settings.deadline_s
    return longest_s if call.deadline_s is None else min(longest_s, max(0.0, call.deadline_s))


async def _awaited(reference: Any) -> Any:
    return await reference
