"""What each program costs: the time of the replica's steps, divided among the turns in them, and the memory it held.

The measured time of a step is divided in proportion to what each turn adds to it by the cost model: its new tokens, the
KV that they read, and an equal part of what does not depend on the work. So the times of all turns add up to the time
in which the replica was busy. They are seconds of the whole replica, of all its GPUs together.

Held memory does not make the replica busy. Its price is the share of the KV memory times the seconds of the hold: a
program that holds a tenth of the memory for ten seconds keeps others out of it for one second of the replica.

If a hold is evicted for a turn of another program, that program has caused what the first one has to compute again.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from cluster.core.program import ProgramIdentity, tenant_of
from replicas.policy import ReplicaFacts
from replicas.vllm_patches import turn_tokens

MAX_UNDER_WAY = 16
"""Largest number of steps that an engine has in flight at once."""
MAX_PROGRAMS = 4096
"""Largest number of programs whose times are kept. The longest without a turn are dropped."""
MAX_TENANTS = 1024
"""Largest number of tenants with times of their own. Those that come later are counted together."""
OTHERS = "others"
"""Name of the tenants above `MAX_TENANTS`, and of a program of another tenant."""


@dataclass(slots=True)
class GpuTime:
    """Seconds of a replica that a turn, a program or a tenant has used."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    recomputed_s: float = 0.0
    """The part of ``prefill_s`` for tokens that had been computed before."""
    held_s: float = 0.0
    """Held KV: its share of the memory times the seconds. The replica was not busy with it."""
    caused_s: float = 0.0
    """``recomputed_s`` of other programs whose KV was evicted for this one. It is in their times, not in these."""

    @property
    def busy_s(self) -> float:
        """Seconds in which the replica computed."""
        return self.prefill_s + self.decode_s

    def add(self, other: "GpuTime") -> None:
        """Add other times to these."""
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_public_dict(self) -> dict[str, float]:
        """Return plain values, in seconds to the microsecond."""
        return {name: round(getattr(self, name), 6) for name in NAMES}


NAMES = tuple(one.name for one in fields(GpuTime))


@dataclass(slots=True)
class TurnTime(GpuTime):
    """The times of one turn. It is no part of those of its program and its tenant before it has ended."""

    caused_by: str | None = None
    """The program for which KV of this turn's program was evicted, if the turn computed it again."""
    sums: "Sequence[Sum]" = field(default=(), repr=False, compare=False)
    """Once it has ended, the sums that it is a part of. A step that was in flight then is added there, too."""

    def shown_to(self, tenant: str) -> dict[str, Any]:
        """Return plain values for a tenant. The program that caused recomputation is named if it is the tenant's."""
        cause = self.caused_by
        if cause is not None:
            cause = cause.partition("/")[2] if tenant_of(cause) == tenant else OTHERS
        return {**self.to_public_dict(), "caused_by": cause}


class Timed(Protocol):
    """A turn."""

    identity: ProgramIdentity
    key: str | None
    cached_tokens: int
    gpu: TurnTime


class BilledTime(Protocol):
    """The times of a program in a day, and its turns: see `replicas.bills.Bill`."""

    def add(self, other: GpuTime) -> None:
        """Add other times to these."""
        ...

    def turn_ended(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count a turn with its tokens."""
        ...


class Sum(Protocol):
    """Times to which those of a turn are added."""

    def add(self, other: GpuTime) -> None:
        """Add other times to these."""
        ...


Part = tuple[TurnTime, float, bool]
"""A turn's part of a step: its times, the seconds that it adds by the cost model, and whether it generates."""


@dataclass(frozen=True, slots=True)
class _Step:
    parts: Sequence[Part]
    seconds: float
    """Sum of the parts."""
    again: Sequence[tuple[TurnTime, float]]
    """The parts, in seconds, that were computed before."""


class GpuTimes:
    """The times of one scheduler's turns, programs and tenants.

    Args:
        facts: returns the cost model, and the size of the KV memory.
        requests: vLLM's requests by id.
        turns: the turns by request id.
        owner_of: returns the program for which a request that is no turn computes, or None.
        bill_of: returns today's bill of a tenant's program. An empty program: of requests that belong to none.
    """

    def __init__(
        self,
        *,
        facts: Callable[[], ReplicaFacts],
        requests: Mapping[str, Request],
        turns: Mapping[str, Timed],
        owner_of: Callable[[str], str | None],
        bill_of: Callable[[str, str], BilledTime],
    ) -> None:
        self._facts = facts
        self._requests = requests
        self._turns = turns
        self._owner_of = owner_of
        self._bill_of = bill_of
        self._programs: dict[str, GpuTime] = {}
        self._tenants: dict[str, GpuTime] = {}
        self._evicted_for: dict[str, str] = {}
        """By program, the one for which its KV was evicted last."""
        self._holds: dict[str, float] = {}
        """By program, the time up to which its hold is counted, where it was trimmed."""
        self._steps: deque[_Step] = deque(maxlen=MAX_UNDER_WAY)
        self.busy_s = 0.0
        """Seconds of all steps that have ended."""

    # --- turns --------------------------------------------------------------------------------------------------------

    def recomputes(self, turn: Timed) -> None:
        """Note that a turn is admitted that computes again what its program had."""
        if turn.key is not None:
            turn.gpu.caused_by = self._evicted_for.get(turn.key)

    def turn_ended(self, turn: Timed, request: Request) -> None:
        """Add a turn that has ended to its program, if it has one, to its tenant, and to the day's bill."""
        turn.gpu.sums = self._sums(turn.key, turn.identity.tenant)
        for one in turn.gpu.sums:
            one.add(turn.gpu)
        prompt, output = turn_tokens(request)
        self._bill(turn.key, turn.identity.tenant).turn_ended(prompt, min(turn.cached_tokens, prompt), output)
        if turn.key is not None:
            self._evicted_for.pop(turn.key, None)

    def program(self, key: str) -> GpuTime:
        """Return the times of a program's turns that have ended."""
        return self._programs.get(key, GpuTime())

    def tenants(self) -> dict[str, dict[str, float]]:
        """Return the times of each tenant's turns, those under way included, as plain values."""
        totals = {name: GpuTime() for name in self._tenants}
        for name, times in self._tenants.items():
            totals[name].add(times)
        for turn in self._turns.values():
            totals.setdefault(self._tenant_name(turn.identity.tenant), GpuTime()).add(turn.gpu)
        return {name: times.to_public_dict() for name, times in totals.items()}

    # --- holds --------------------------------------------------------------------------------------------------------

    def hold_changes(self, key: str, tokens: int, since_s: float, now_s: float, *, ends: bool) -> None:
        """Add the time of a hold of ``tokens`` that began at ``since_s``. It ends now, or is about to be trimmed."""
        held_s = tokens / self._facts().capacity_tokens * (now_s - self._holds.pop(key, since_s))
        for one in self._sums(key, tenant_of(key)):
            one.add(GpuTime(held_s=held_s))
        if not ends:
            self._holds[key] = now_s

    def evicted(self, key: str, by: str | None) -> None:
        """Note that KV of program ``key`` is evicted for a turn of program ``by``. None: the turn has no program."""
        if by is not None and by != key:
            self._evicted_for.pop(key, None)
            self._evicted_for[key] = by
            if len(self._evicted_for) > MAX_PROGRAMS:
                del self._evicted_for[next(iter(self._evicted_for))]

    # --- steps --------------------------------------------------------------------------------------------------------

    def step_began(self, output: SchedulerOutput, again: Mapping[str, int]) -> None:
        """Note a step that was scheduled.

        Args:
            output: the step. It has tokens.
            again: by request id, the tokens of the step that were computed before.
        """
        cost, scheduled = self._facts().cost, output.num_scheduled_tokens
        fixed_s = cost.sequence_s + cost.overhead_s / len(scheduled)
        token_s = max(cost.token_s, cost.weights_s / output.total_num_scheduled_tokens)
        context_s, pair_s, requests, turns = cost.context_s, cost.pair_s, self._requests, self._turns
        one_s, read_s = fixed_s + token_s, context_s + pair_s  # of a turn that generates; most do
        parts: list[Part] = []
        repeated: list[tuple[TurnTime, float]] = []
        total = 0.0
        for request_id, tokens in scheduled.items():
            request, turn = requests[request_id], turns.get(request_id)
            length = request.num_computed_tokens  # vLLM counts the step's own already
            if tokens == 1:
                seconds = one_s + length * read_s
            else:
                pairs = tokens * (2 * length - tokens + 1) / 2
                seconds = fixed_s + tokens * token_s + length * context_s + pairs * pair_s
            total += seconds
            used = self._ownerless(request_id) if turn is None else turn.gpu
            parts.append((used, seconds, length - tokens >= request.num_prompt_tokens))
            if again and request_id in again:
                repeated.append((used, seconds * again[request_id] / tokens))
        self._steps.append(_Step(parts, total, repeated))

    def _ownerless(self, request_id: str) -> TurnTime:
        key = self._owner_of(request_id)
        return TurnTime(sums=self._sums(key, tenant_of(key)) if key is not None else ())

    def step_ended(self, took_s: float) -> None:
        """Divide the time of the oldest step in flight, which took ``took_s`` seconds."""
        if not self._steps:
            return
        step = self._steps.popleft()
        self.busy_s += took_s
        scale = took_s / step.seconds if step.seconds else 0.0
        for used, seconds, generates in step.parts:
            if generates:
                used.decode_s += seconds * scale
            else:
                used.prefill_s += seconds * scale
            if used.sums:  # it has ended since the step began
                took = GpuTime(**{"decode_s" if generates else "prefill_s": seconds * scale})
                for one in used.sums:
                    one.add(took)
        for used, seconds in step.again:
            used.recomputed_s += seconds * scale
            for one in used.sums:
                one.add(GpuTime(recomputed_s=seconds * scale))
            if used.caused_by is not None:
                for one in self._sums(used.caused_by, tenant_of(used.caused_by)):
                    one.add(GpuTime(caused_s=seconds * scale))

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _bill(self, key: str | None, tenant: str) -> BilledTime:
        return self._bill_of(self._tenant_name(tenant), "" if key is None else key.partition("/")[2])

    def _sums(self, key: str | None, tenant: str) -> tuple[Sum, ...]:
        own, bill = self._tenants.setdefault(self._tenant_name(tenant), GpuTime()), self._bill(key, tenant)
        if key is None:
            return (own, bill)
        program = self._programs.pop(key, None) or GpuTime()
        self._programs[key] = program
        if len(self._programs) > MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return (own, program, bill)

    def _tenant_name(self, tenant: str) -> str:
        return tenant if tenant in self._tenants or len(self._tenants) < MAX_TENANTS else OTHERS
