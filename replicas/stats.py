"""The scheduler's statistics: totals, single observations, wasted KV, and notes of traced turns.

Nothing is exported from here, because the engine's process has no Ray. The replica reads them about once a second and
records them (`replicas.control`, `cluster.observing`). Totals only grow, so that a lost answer loses nothing.
Observations and notes are sent again until the replica acknowledges their number.

A step costs two additions here, and a check whether a turn computes tokens again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, Generic, TypeVar

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from cluster.core.lifecycle.events import PauseReason, ReleaseReason
from replicas.cached_prefix import CachedPrefixes
from replicas.gpu_time import GpuTimes
from replicas.hold_table import HoldOrigin, HoldTable
from replicas.program_table import KvDecision, ProgramTable, TurnRecord
from replicas.turns import Turn

MAX_OBSERVED = 16_384
"""Largest number of observations that are kept until the replica reads them. The oldest are dropped when there are
more."""
MAX_NOTES = 8192
"""Largest number of notes of traced turns that are kept until the replica reads them."""
MAX_UNDER_WAY = 16
"""Largest number of steps that an engine has in flight at once."""
SAMPLED_BLOCKS = 4096
"""Largest number of blocks of a pool that are counted, evenly spread. The cached share of a larger pool is then right
within about two percent, and the count takes 0.3 ms of the engine's time."""

Item = TypeVar("Item")


class Part(StrEnum):
    """A part of an admitted turn's prompt."""

    NEW = "new"
    REUSED = "reused"
    """Its KV was on the device."""
    FETCHED = "fetched"
    """Its KV came from the host tier, before the turn or with it."""
    DISK = "disk"
    """Its KV came from the disk tier, through the host tier."""
    RECOMPUTED = "recomputed"
    """Its KV was computed for the program before, and is computed again."""


class Seen(StrEnum):
    """Quantities that are observed one by one, in seconds."""

    QUEUE_FIRST = "queue_first"
    """Time from arrival to admission of a program's first turn."""
    QUEUE_RESUMED = "queue_resumed"
    """Time from arrival to admission of a turn that follows a pause."""
    HOLD = "hold"
    """Time for which a program's KV was held."""


@dataclass(frozen=True, slots=True)
class Fresh(Generic[Item]):
    """The items that a reader does not have yet."""

    number: int
    """Number of all items so far. The reader acknowledges it with its next call."""
    lost: int
    """Number of items that were dropped before the reader had them."""
    items: tuple[Item, ...]


class RingBuffer(Generic[Item]):
    """The latest items, numbered, for a reader that reads at intervals and acknowledges what it has.

    Args:
        limit: largest number of items. The oldest are dropped when there are more.
    """

    def __init__(self, limit: int) -> None:
        self._items: deque[Item] = deque(maxlen=limit)
        self.number = 0
        """Number of items that were put in."""

    def put(self, item: Item) -> None:
        """Add an item."""
        self._items.append(item)
        self.number += 1

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def since(self, taken: int) -> Fresh[Item]:
        """Return the items after the first ``taken``.

        It returns all if ``taken`` is too large, as of another buffer.
        """
        taken = taken if 0 <= taken <= self.number else 0
        wanted = self.number - taken
        kept = min(wanted, len(self._items))
        return Fresh(self.number, wanted - kept, tuple(islice(self._items, len(self._items) - kept, None)))


@dataclass(slots=True)
class Waste:
    """KV memory that did no work, integrated over time up to the last call, in token-seconds.

    These are the two terms of InferCept's eq. 1 that a replica can measure. Simulated replicas use the same definition.
    """

    held: float = 0.0
    """Held KV, of paused programs and of turns that wait."""
    recomputed: float = 0.0
    """KV of all turns that run in a step, times the share of recomputed tokens in the scheduled tokens. It includes the
    program's own KV, and that of turns which are not in the step because its prompts come first (eq. 1's C_other)."""
    recomputing_s: float = 0.0
    """Seconds of the steps, times that share."""
    _settled_s: float = field(default=0.0, repr=False, compare=False)

    def settle(self, now_s: float, held_tokens: int) -> None:
        """Add the held KV since the last call. It has to be called before ``held_tokens`` changes."""
        self.held += held_tokens * (now_s - self._settled_s)
        self._settled_s = now_s

    def recompute(self, again: int, total: int, context: int, seconds: float) -> None:
        """Add a step.

        Args:
            again: tokens of the step that were computed before.
            total: scheduled tokens of the step.
            context: tokens of KV of all turns that run.
            seconds: duration of the step.
        """
        self.recomputed += again / total * seconds * context
        self.recomputing_s += again / total * seconds


def computed_again(length: int, tokens: int, known_tokens: int) -> int:
    """Return how many of one turn's ``tokens`` in a step were computed before.

    Args:
        length: computed tokens of the turn after the step.
        tokens: tokens of the turn in the step.
        known_tokens: leading tokens whose KV was computed before.
    """
    return max(0, min(length, known_tokens) - (length - tokens))


@dataclass(frozen=True, slots=True)
class KvUse:
    """What a replica's KV blocks are used for. The four numbers add up to all blocks."""

    running: int
    """Blocks allocated to turns. Turns that wait after a preemption or for a load are included."""
    held: int
    """Blocks that only paused programs own."""
    cached: int
    """Free blocks whose contents the prefix cache can still use."""
    empty: int

    @classmethod
    def of(cls, pool: BlockPool, held_blocks: int = 0) -> "KvUse":
        """Return the use between two steps.

        A prefix that two holds share, or a hold and a running turn, counts as held.
        """
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        held = min(held_blocks, total - free)
        cached = min(free, cached_blocks(pool.blocks))
        return cls(running=total - free - held, held=held, cached=cached, empty=free - cached)


def cached_blocks(blocks: Sequence[Any]) -> int:
    """Return how many of a pool's blocks are free and in the prefix cache.

    For a large pool it is estimated by a sample.
    """
    stride = -(-len(blocks) // SAMPLED_BLOCKS)
    found = sum(1 for block in blocks[::stride] if block.ref_cnt == 0 and block.block_hash is not None)
    return found * stride


class TurnTraces:
    """Times of turns whose identity has a trace parent.

    The engine has the times, and the replica makes spans of them.
    """

    def __init__(self) -> None:
        self.notes: RingBuffer[dict[str, Any]] = RingBuffer(MAX_NOTES)
        self._holds: dict[str, str] = {}

    def turn_ended(self, turn: Turn, record: TurnRecord, now_s: float) -> None:
        """Note a turn that has ended, after the decision about its program's KV."""
        traceparent = turn.identity.traceparent
        if traceparent is None:
            return
        self.notes.put(
            {
                "what": "turn",
                "traceparent": traceparent,
                "arrived_s": turn.arrived_s,
                "admitted_s": turn.admitted_s,
                "first_token_s": turn.first_token_s,
                "ended_s": now_s,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.output_tokens,
                "preemptions": record.preemptions,
                "tools": list(record.tools),
                "outcome": record.outcome,
                "decision": record.decision_text,
            }
        )

    def hold_began(self, key: str, turn: Turn) -> None:
        """Note that the program is held after this turn."""
        if turn.identity.traceparent is not None:
            self._holds[key] = turn.identity.traceparent

    def hold_ended(self, key: str, since_s: float, until_s: float, reason: ReleaseReason) -> None:
        """Note that the program's hold has ended."""
        traceparent = self._holds.pop(key, None)
        if traceparent is not None:
            times = {"since_s": since_s, "until_s": until_s}
            self.notes.put({"what": "hold", "traceparent": traceparent, "how": reason.label, **times})


class Stats:
    """One scheduler's statistics since its start.

    Args:
        now_s: returns the scheduler's time, in seconds.
        programs: its programs.
        holds: its holds.
        cached_prefixes: its estimates of what the prefix cache has of paused programs.
        requests: vLLM's requests by id.
        block_tokens: tokens of a block hash.
        starvation_s: seconds of waiting for admission after which a turn counts as starved.
        gpu_times: the times of its turns.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        programs: ProgramTable,
        holds: HoldTable[KVCacheBlock],
        cached_prefixes: CachedPrefixes,
        requests: Mapping[str, Request],
        block_tokens: int,
        starvation_s: float,
        gpu_times: GpuTimes,
    ) -> None:
        self._now_s = now_s
        self._programs = programs
        self._holds = holds
        self._cached_prefixes = cached_prefixes
        self._requests = requests
        self._block_tokens = block_tokens
        self._starvation_s = starvation_s
        self._gpu_times = gpu_times
        self.traces = TurnTraces()
        self.pauses: Counter[tuple[KvDecision, PauseReason]] = Counter()
        self.holds_ended: Counter[ReleaseReason] = Counter()
        self.context_tokens: Counter[Part] = Counter()
        self.starved = 0
        self.steps = 0
        self.scheduled_tokens = 0
        self.waste = Waste()
        self._observed: RingBuffer[tuple[Seen, float]] = RingBuffer(MAX_OBSERVED)
        self._known: dict[str, int] = {}
        """Leading tokens that were computed before, by request id, of turns that compute some of them again."""
        self._again: deque[tuple[SchedulerOutput, int, int]] = deque(maxlen=MAX_UNDER_WAY)
        """Steps in flight that recompute: their output, recomputed tokens, and the tokens of KV of running turns."""

    # --- events -------------------------------------------------------------------------------------------------------

    def paused(self, decision: KvDecision, reason: PauseReason) -> None:
        """Count what was decided about a paused program's KV."""
        # A third-party policy may give any text, but a metric may only have few label values.
        self.pauses[decision, reason if isinstance(reason, PauseReason) else PauseReason.OTHER] += 1

    def holds_change(self) -> None:
        """Update the waste. A hold is about to begin or to end."""
        self.waste.settle(self._now_s(), self._holds.num_tokens)

    def hold_changes(self, key: str) -> None:
        """Update the waste and the program's time. Its hold is about to become shorter or longer."""
        self.holds_change()
        if (held := self._holds.get(key)) is not None:
            self._gpu_times.hold_changes(key, held.tokens, held.since_s, self._now_s(), ends=False)

    def hold_ends(self, key: str, reason: ReleaseReason) -> None:
        """Record a hold that is about to end."""
        self.holds_change()
        held = self._holds.get(key)
        if held is not None:
            now_s = self._now_s()
            self.holds_ended[reason] += 1
            self._observed.put((Seen.HOLD, now_s - held.since_s))
            self._gpu_times.hold_changes(key, held.tokens, held.since_s, now_s, ends=True)
            self.traces.hold_ended(key, held.since_s, now_s, reason)

    def admitted(self, request: Request, turn: Turn, local: int, remote: int) -> None:
        """Record a turn's first admission, before the event is applied to its program.

        Args:
            request: the turn's request.
            turn: what is noted of the turn.
            local: tokens whose KV was on the device.
            remote: tokens whose KV comes from the host tier, or from the disk tier through it.
        """
        assert turn.admitted_s is not None, "the scheduler sets it first"
        waited_s = turn.admitted_s - turn.arrived_s
        key, known = turn.key, 0
        if key is not None:
            held = self._holds.get(key)
            if held is not None and held.origin is HoldOrigin.FETCHED:
                fetched = min(local, held.tokens)
                local, remote = local - fetched, remote + fetched
            known = self._known_tokens(key, request) if turn.resumes else 0
        self._observed.put((Seen.QUEUE_RESUMED if turn.resumes else Seen.QUEUE_FIRST, waited_s))
        self._waited(waited_s)
        there, from_disk = local + remote, min(remote, turn.disk_tokens)
        again = max(0, known - there)
        self.context_tokens[Part.REUSED] += local
        self.context_tokens[Part.FETCHED] += remote - from_disk
        self.context_tokens[Part.DISK] += from_disk
        self.context_tokens[Part.RECOMPUTED] += again
        self.context_tokens[Part.NEW] += max(0, int(request.num_tokens) - there - again)
        if again:
            self._known[request.request_id] = known
            self._gpu_times.recomputes(turn)

    def preempted(self, request: Request) -> None:
        """Record that a running turn is about to lose its memory."""
        computed = min(int(request.num_computed_tokens), int(request.num_tokens))
        self._known[request.request_id] = max(computed, self._known.get(request.request_id, 0))

    def ended(self, request: Request, turn: Turn) -> None:
        """Record the end of a turn, whatever its outcome."""
        self._known.pop(request.request_id, None)
        self._gpu_times.turn_ended(turn, request)
        if turn.admitted_s is None:
            self._waited(self._now_s() - turn.arrived_s)

    def step_began(self, output: SchedulerOutput) -> None:
        """Count a step that was scheduled."""
        total = output.total_num_scheduled_tokens
        if not total:
            return
        self.steps += 1
        self.scheduled_tokens += total
        self._gpu_times.step_began(output, self._note_again(output) if self._known else {})

    def step_ended(self, output: SchedulerOutput, took_s: float) -> None:
        """Record the end of a step, which took ``took_s`` seconds."""
        if self._again and self._again[0][0] is output:
            _, again, context = self._again.popleft()
            self.waste.recompute(again, output.total_num_scheduled_tokens, context, took_s)
        if output.total_num_scheduled_tokens:
            self._gpu_times.step_ended(took_s)

    # --- for the replica ----------------------------------------------------------------------------------------------

    def observations(self, taken: int | None) -> dict[str, Any]:
        """Return the observations after the first ``taken``. None: the replica does not want any.

        The replica acknowledges ``number`` with its next call.
        """
        if taken is None:
            return {"number": self._observed.number}
        fresh = self._observed.since(taken)
        values: dict[str, list[float]] = {str(seen): [] for seen in Seen}
        for seen, value in fresh.items:
            values[seen].append(value)
        return {"number": fresh.number, "lost": fresh.lost, **values}

    def numbers(self) -> dict[str, Any]:
        """Return the totals as plain values. ``wasted_token_seconds`` is in tokens times seconds."""
        self.holds_change()
        pauses: dict[str, dict[str, int]] = {str(decision): {} for decision in KvDecision}
        for (decision, reason), count in self.pauses.items():
            pauses[decision][str(reason)] = count
        ends = dict.fromkeys((reason.label for reason in ReleaseReason), 0)
        for ended, count in self.holds_ended.items():
            ends[ended.label] += count
        return {
            "kv_retention_decisions": pauses,
            "kv_pins_released": ends,
            "context_tokens": {str(part): self.context_tokens[part] for part in Part},
            "wasted_token_seconds": {"held": self.waste.held, "recomputed": self.waste.recomputed},
            "starved_turns": self.starved,
            "steps": self.steps,
            "scheduled_tokens": self.scheduled_tokens,
            "busy_s": self._gpu_times.busy_s,
            "gpu_s": self._gpu_times.tenants(),
        }

    def _waited(self, seconds: float) -> None:
        self.starved += seconds > self._starvation_s

    def _known_tokens(self, key: str, request: Request) -> int:
        """Return how many leading prompt tokens were computed before, to an eighth where the prompt has changed."""
        known = min(self._programs[key].context_tokens, int(request.num_tokens))
        prefix = self._cached_prefixes.get(key)
        if prefix is None or not prefix.marks or not request.block_hashes:
            return known
        common = 0
        for tokens, block_hash in prefix.marks:
            if not _has(request.block_hashes, tokens // self._block_tokens - 1, block_hash):
                return min(known, common)
            common = tokens
        return known

    def _note_again(self, output: SchedulerOutput) -> dict[str, int]:
        """Return the tokens of a step that were computed before, by request id, and note them for its end."""
        requests, scheduled, again = self._requests, output.num_scheduled_tokens, {}
        for request_id in [request_id for request_id in self._known if request_id in scheduled]:
            length = requests[request_id].num_computed_tokens  # vLLM counts the step's own already
            if repeated := computed_again(length, scheduled[request_id], self._known[request_id]):
                again[request_id] = repeated
            if length >= self._known[request_id]:
                del self._known[request_id]
        if again:
            context = sum(request.num_computed_tokens for request in requests.values())
            self._again.append((output, sum(again.values()), context))
        return again


def _has(hashes: Sequence[bytes], index: int, block_hash: bytes) -> bool:
    return 0 <= index < len(hashes) and hashes[index] == block_hash
