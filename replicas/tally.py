"""What a scheduler counts for whoever looks at the replica: plain numbers, taken where things happen, told when asked.

Nothing here is exported from here: the engine's process has no Ray. The replica asks about once a second and records
(`replicas.control`, `cluster.observing`). Totals only grow, so that an answer that is lost loses nothing; observations
are told again until the replica says how many it has.

The step path costs two additions and a look whether somebody computes again what was there before. Who does is known
from admissions and preemptions. Of vLLM 0.29.0 ``Scheduler._preempt_request`` is wrapped, and tests pin it: how far a
turn was is forgotten by it.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from replicas.hold_table import HoldOrigin
from replicas.kv_waste import Waste, computed_again
from replicas.outbox import Outbox
from replicas.policy import Why

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler
    from replicas.turns import Turn

MAX_OBSERVED = 16_384
"""Observations kept for a replica that has not asked yet; of more, the oldest are lost."""
MAX_UNDER_WAY = 16
"""Steps that an engine has under way at once, at most."""


class Decision(StrEnum):
    """What became of a paused program's KV."""

    HOLD = "hold"
    SWAP = "swap"
    RELEASE = "release"


class HoldEnd(StrEnum):
    """How a hold ended."""

    USED = "used"
    """By the program's next turn."""
    EXPIRED = "expired"
    BROKEN_RUNNING = "broken_running"
    """For a running turn that grew."""
    BROKEN_WAITING = "broken_waiting"
    BROKEN_STARVED = "broken_starved"
    """For a waiting turn while nothing ran."""
    SWAPPED = "swapped"
    """The policy looked at it again: the host has a copy."""
    REVIEWED = "reviewed"
    """The policy looked at it again: released."""
    ASKED = "asked"
    """The client or the cluster wanted it, or the program ended."""
    MOVED = "moved"
    """The program lives on another replica now."""
    ABORTED = "aborted"
    """Its program's turn was."""
    RESET = "reset"
    """Another policy, or the cache was emptied."""


HOLD_ENDS: Mapping[str, HoldEnd] = {
    "used": HoldEnd.USED,
    "expired": HoldEnd.EXPIRED,
    "broken for a running turn": HoldEnd.BROKEN_RUNNING,
    "broken for a waiting turn": HoldEnd.BROKEN_WAITING,
    "broken for a starved turn": HoldEnd.BROKEN_STARVED,
    "swapped": HoldEnd.SWAPPED,
    "asked": HoldEnd.ASKED,
    "idle": HoldEnd.EXPIRED,
    "table full": HoldEnd.EXPIRED,
    "moved": HoldEnd.MOVED,
    "aborted": HoldEnd.ABORTED,
    "policy switch": HoldEnd.RESET,
    "cache reset": HoldEnd.RESET,
}
"""By the reason of `cluster.lifecycle_events.FreeHold`. Any other is the policy's own, at a review."""


class Part(StrEnum):
    """Of an admitted turn's prompt."""

    NEW = "new"
    REUSED = "reused"
    """Its KV was on the device."""
    FETCHED = "fetched"
    """It came from the host tier, before the turn or with it."""
    RECOMPUTED = "recomputed"
    """It was computed for the program before, and is computed again."""


class Seen(StrEnum):
    """What is observed one by one, in seconds."""

    QUEUE_FIRST = "queue_first"
    """From arrival to admission, of turns that no pause came before."""
    QUEUE_RESUMED = "queue_resumed"
    """The same of turns that come back from a pause: the bubble."""
    HOLD = "hold"
    """For how long a program's KV was held."""


class Tally:
    """One scheduler's numbers since its start."""

    def __init__(self, scheduler: "AgentScheduler") -> None:
        self._scheduler = scheduler
        self.pauses: Counter[tuple[Decision, Why]] = Counter()
        self.holds_ended: Counter[HoldEnd] = Counter()
        self.context_tokens: Counter[Part] = Counter()
        self.starved = 0
        """Turns that waited longer than the bound for their admission."""
        self.steps = 0
        self.scheduled_tokens = 0
        self.waste = Waste()
        self._observed: Outbox[tuple[Seen, float]] = Outbox(MAX_OBSERVED)
        self._known: dict[str, int] = {}
        """By request id, of turns that compute again: how many leading tokens were computed before."""
        self._again: deque[tuple[SchedulerOutput, int, int]] = deque(maxlen=MAX_UNDER_WAY)
        """Steps under way that compute again: how much of it, and the batch's KV."""
        scheduler._preempt_request = self._noting_preemptions(scheduler._preempt_request)

    # --- where things happen ------------------------------------------------------------------------------------------

    def paused(self, decision: Decision, reason: str) -> None:
        """A program pauses, and this was done with its KV."""
        self.pauses[decision, Why.of(reason)] += 1

    def holds_change(self) -> None:
        """A hold is about to begin or to end."""
        self.waste.settle(self._scheduler.clock.now_s(), self._scheduler.holds.num_tokens)

    def hold_ends(self, key: str, reason: str) -> None:
        """The program's hold is about to end."""
        self.holds_change()
        held = self._scheduler.holds.get(key)
        if held is not None:
            how, now_s = HOLD_ENDS.get(reason, HoldEnd.REVIEWED), self._scheduler.clock.now_s()
            self.holds_ended[how] += 1
            self._observe(Seen.HOLD, now_s - held.since_s)
            self._scheduler.traced.hold_ended(key, held.since_s, now_s, how.value)

    def admitted(self, request: Request, turn: "Turn", local: int, remote: int) -> None:
        """A turn has its memory for the first time; its program does not know it yet.

        Args:
            request: the turn's.
            turn: what is noted of it.
            local: tokens whose KV was on the device.
            remote: tokens whose KV the host tier brings.
        """
        assert turn.admitted_s is not None, "the scheduler notes it first"
        waited_s = turn.admitted_s - turn.arrived_s
        key, known, resumed = turn.key, 0, False
        if key is not None:
            resumed = self._scheduler.programs[key].turns > 1
            held = self._scheduler.holds.get(key)
            if held is not None and held.origin is HoldOrigin.FETCHED:
                fetched = min(local, held.tokens)
                local, remote = local - fetched, remote + fetched
            known = self._known_tokens(key, request) if resumed else 0
        self._observe(Seen.QUEUE_RESUMED if resumed else Seen.QUEUE_FIRST, waited_s)
        self._waited(waited_s)
        there = local + remote
        again = max(0, known - there)
        self.context_tokens[Part.REUSED] += local
        self.context_tokens[Part.FETCHED] += remote
        self.context_tokens[Part.RECOMPUTED] += again
        self.context_tokens[Part.NEW] += max(0, int(request.num_tokens) - there - again)
        if again:
            self._known[request.request_id] = known

    def ended(self, request: Request, turn: "Turn") -> None:
        """A turn is over, whatever its outcome."""
        self._known.pop(request.request_id, None)
        if turn.admitted_s is None:
            self._waited(self._scheduler.clock.now_s() - turn.arrived_s)

    def step_began(self, output: SchedulerOutput) -> None:
        """A step was scheduled."""
        total = output.total_num_scheduled_tokens
        if not total:
            return
        self.steps += 1
        self.scheduled_tokens += total
        if self._known:
            self._note_again(output)

    def step_ended(self, output: SchedulerOutput, took_s: float) -> None:
        """Its tokens have come."""
        if self._again and self._again[0][0] is output:
            _, again, context = self._again.popleft()
            self.waste.recompute(again, output.total_num_scheduled_tokens, context, took_s)

    # --- what is told -------------------------------------------------------------------------------------------------

    def observations(self, taken: int | None) -> dict[str, Any]:
        """What was observed since the replica had ``taken`` observations; None: it wants none.

        ``number`` is how many there were in all: what it says next time.
        """
        if taken is None:
            return {"number": self._observed.number}
        fresh = self._observed.since(taken)
        values: dict[str, list[float]] = {str(seen): [] for seen in Seen}
        for seen, value in fresh.items:
            values[seen].append(value)
        return {"number": fresh.number, "lost": fresh.lost, **values}

    def numbers(self) -> dict[str, Any]:
        """The totals as plain values; ``wasted`` in tokens times seconds."""
        self.holds_change()
        pauses: dict[str, dict[str, int]] = {str(decision): {} for decision in Decision}
        for (decision, reason), count in self.pauses.items():
            pauses[decision][str(reason)] = count
        return {
            "pauses": pauses,
            "holds_ended": {str(how): self.holds_ended[how] for how in HoldEnd},
            "context_tokens": {str(part): self.context_tokens[part] for part in Part},
            "wasted_token_seconds": {"held": self.waste.held, "recomputed": self.waste.recomputed},
            "starved_turns": self.starved,
            "steps": self.steps,
            "scheduled_tokens": self.scheduled_tokens,
        }

    # --- within -------------------------------------------------------------------------------------------------------

    def _observe(self, seen: Seen, seconds: float) -> None:
        self._observed.put((seen, seconds))

    def _waited(self, seconds: float) -> None:
        self.starved += seconds > self._scheduler.settings.control.starvation_s

    def _known_tokens(self, key: str, request: Request) -> int:
        """Leading tokens of the prompt that were computed for the program before: to an eighth where it has changed."""
        known = min(self._scheduler.programs[key].context_tokens, int(request.num_tokens))
        left = self._scheduler.remains.get(key)
        if left is None or not left.marks or not request.block_hashes:
            return known
        size, common = self._scheduler.hash_block_size, 0
        for tokens, block_hash in left.marks:
            if not _has(request.block_hashes, tokens // size - 1, block_hash):
                return min(known, common)
            common = tokens
        return known

    def _noting_preemptions(self, preempt: Callable[..., None]) -> Callable[..., None]:
        def noting(request: Request, *args: Any, **kwargs: Any) -> None:
            computed = min(int(request.num_computed_tokens), int(request.num_tokens))
            self._known[request.request_id] = max(computed, self._known.get(request.request_id, 0))
            preempt(request, *args, **kwargs)

        return noting

    def _note_again(self, output: SchedulerOutput) -> None:
        requests, scheduled, recomputed = self._scheduler.requests, output.num_scheduled_tokens, 0
        for request_id in [request_id for request_id in self._known if request_id in scheduled]:
            length = requests[request_id].num_computed_tokens  # vLLM counts the step's own already
            recomputed += computed_again(length, scheduled[request_id], self._known[request_id])
            if length >= self._known[request_id]:
                del self._known[request_id]
        if recomputed:
            context = sum(requests[request_id].num_computed_tokens for request_id in scheduled)
            self._again.append((output, recomputed, context))


def _has(hashes: Sequence[bytes], index: int, block_hash: bytes) -> bool:
    return 0 <= index < len(hashes) and hashes[index] == block_hash
