"""Which waiting turns lack a slot of a LoRA adapter. vLLM runs turns of ``max_loras`` adapters at a time.

vLLM skips a turn that lacks a slot, and admits later turns of the adapters that run. Without a bound it would wait for
as long as such turns come. Therefore, once it is due (`replicas.policies.yielding.is_due`), one of these adapters gives
up its slot: turns of it that came later are skipped, until the last one that runs has ended.

vLLM counts the adapters of the turns that a step computes, and fails where there are more than slots. A prompt that
waits for a step (`replicas.prefill_scheduling`) is in the next one again, so that here its slot counts as taken.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from vllm.v1.request import Request

from replicas.policies.yielding import is_due
from replicas.policy import TurnView
from replicas.turns import Turn
from replicas.waiting_queue import ADMISSIBLE, RankedQueue, first_of


class AdapterSlots:
    """The slots of one scheduler.

    Args:
        most: returns the number of slots. 0: there are no adapters.
        running: returns the turns that run.
        turns: the turns that wait or run, by request id.
        view: makes the view of a waiting turn.
    """

    def __init__(
        self,
        *,
        most: Callable[[], int],
        running: Callable[[], Sequence[Request]],
        turns: Mapping[str, Turn],
        view: Callable[[Request], TurnView],
    ) -> None:
        self._most = most
        self._running = running
        self._turns = turns
        self._view = view
        self._counted: tuple[int, str] | None = None
        self._counts: Counter[int] = Counter()
        """Number of running turns by adapter."""
        self._given_up: tuple[int, float] | None = None
        """The adapter that gives up its slot, and the arrival of the turn for which it does so, in seconds."""

    def step_begins(self, queues: tuple[RankedQueue, RankedQueue], max_wait_s: float | None) -> None:
        """Decide which adapter gives up its slot in this step.

        Args:
            queues: the waiting turns.
            max_wait_s: the longest wait, in seconds. None: no turn is ever due.
        """
        self._counted, self._given_up = None, None
        if max_wait_s is None:
            return
        first = first_of(queues, lambda request: request.status in ADMISSIBLE and self.lacks(request))
        if first is None or first.request.request_id not in self._turns:
            return
        turn, counts = self._view(first.request), self._count()
        if counts and is_due(turn, max_wait_s):
            self._given_up = (min(counts, key=lambda adapter: (counts[adapter], adapter)), turn.arrived_s)

    def lacks(self, request: Request) -> bool:
        """Return whether other adapters have all slots."""
        adapter = adapter_of(request)
        if adapter is None:
            return False
        counts = self._count()
        return adapter not in counts and len(counts) >= self._most()

    def blocks(self, request: Request) -> bool:
        """Return whether a waiting turn is not admitted in this step because of the slots."""
        return self.lacks(request) or self._gives_up(request)

    def _gives_up(self, request: Request) -> bool:
        """Return whether the turn waits because its adapter gives up its slot.

        A turn that owns memory does not wait, as others may lack that memory.
        """
        if self._given_up is None or request.num_computed_tokens or adapter_of(request) != self._given_up[0]:
            return False
        turn = self._turns.get(request.request_id)
        return turn is None or turn.arrived_s > self._given_up[1]

    def _count(self) -> Counter[int]:
        running = self._running()
        counted = (len(running), running[-1].request_id if running else "")  # in a step, turns are added at the end
        if counted != self._counted:
            adapters = map(adapter_of, running)
            self._counted, self._counts = counted, Counter(one for one in adapters if one is not None)
        return self._counts


def adapter_of(request: Request) -> int | None:
    """Return vLLM's number of a turn's adapter. None: it has none."""
    return request.lora_request.lora_int_id if request.lora_request else None
