"""Orders the prompts that a step computes.

vLLM gives a step's tokens to the running turns in the order of their admission, and the rest to waiting turns. A long
prompt that has begun blocks all others until it is computed (head-of-line blocking). Here turns that generate come
first, with one token and their drafted ones each, and then prompts by their rank. A waiting turn that ranks before them
has its tokens left free.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from replicas.cached_prefix import leading_blocks
from replicas.policy import IsLate, RankKey
from replicas.waiting_queue import Ranked

NOBODY: Mapping[str, bool] = MappingProxyType({})
PLACES = {False: -1, None: 0, True: 1}
"""Place of a turn that generates, by what is known of its memory (see `PrefillScheduling.order`)."""


@dataclass(frozen=True, slots=True)
class Head:
    """The waiting turn that is admitted next."""

    request_id: str
    rank: RankKey
    tokens: int
    """Tokens that it has to compute."""


def head_of(
    first: Ranked,
    missing: Callable[[Request], int],
    cached: Callable[[BlockHash], bool] | None,
    block_tokens: int,
) -> Head | None:
    """Return the waiting turn that is admitted next. None: vLLM skips it in this step, see `replicas.single_flight`.

    Args:
        first: the first turn that can be admitted.
        missing: returns the tokens of a waiting turn that are not held for it.
        cached: returns whether the prefix cache has a block. None: it is not looked up.
        block_tokens: tokens of a block.
    """
    rank, request = first
    if request.num_stale_output_tokens:
        return None
    tokens = missing(request)
    if cached is not None and not request.num_computed_tokens:
        tokens = min(tokens, max(1, request.num_tokens - leading_blocks(request.block_hashes, cached) * block_tokens))
    return Head(request.request_id, rank, tokens)


class PrefillScheduling:
    """The order of one scheduler's prompts. vLLM's own order stays where the policy ranks no running prompts."""

    def __init__(self) -> None:
        self._late: frozenset[str] = frozenset()
        self._ranks: dict[str, RankKey] = {}
        self._last_head: str | None = None
        self._sat_out = False

    def is_late(self, request_id: str) -> bool:
        """Return whether this is a running prompt that is late."""
        return request_id in self._late

    def tokens(self, running: list[Request]) -> int:
        """Return how many tokens the running prompts still need computed, without the prompts that are late."""
        return sum(missing_tokens(request) for request in under_way(running) if request.request_id not in self._late)

    def order(
        self,
        running: list[Request],
        *,
        rank: Callable[[Request], RankKey],
        ranked: bool,
        is_late: IsLate | None,
        tokens: int,
        yielding: Mapping[str, bool] = NOBODY,
    ) -> bool:
        """Sort ``running`` before a step: turns that generate, then prompts by their rank.

        Args:
            running: vLLM's list, which is sorted in place.
            rank: returns the rank of a running prompt.
            ranked: whether prompts have ranks. False: the list stays as it is.
            is_late: whether prompts of a rank are late. None: no prompt is late.
            tokens: what the method `tokens` returns for these turns.
            yielding: by request id, whether a turn gives its memory to others (True), or to nobody (False). Of the
                turns that generate, the former come last, so that they are preempted when another one lacks memory, and
                the latter come first.

        Returns:
            Whether the set of late prompts has changed.
        """
        # In most steps all turns generate, and none has to be looked at.
        prompts = under_way(running) if ranked and (tokens or self._late) else []
        ranks = self._ranks = {request.request_id: rank(request) for request in prompts}
        late = frozenset(name for name, key in ranks.items() if is_late is not None and is_late(key))
        changed, self._late = late != self._late, late
        if prompts or (yielding and ranked):
            # Stable: turns that generate have equal ranks and stay in the order of their admission.
            running.sort(
                key=lambda request: (
                    (2, found)
                    if (found := ranks.get(request.request_id)) is not None
                    else (PLACES[yielding.get(request.request_id)], ())
                )
            )
        return changed

    def make_room(self, running: list[Request], head: Callable[[], Head | None], *, budget: int, step: int) -> int:
        """Leave the tokens that a waiting turn needs to it, if it ranks before prompts that have begun.

        The first of these prompts gets what is left, and the others wait for a step. If less is left than the waiting
        turn, or a prompt before it, needs, all of them wait, in every other step at most. A turn for which room was
        made and that still waits lacks something else, such as memory: nothing is left to it in the next step.

        Args:
            running: vLLM's list, sorted by `order`.
            head: returns the waiting turn that is admitted next. None: nothing waits.
            budget: tokens of the step.
            step: number of the previous step.

        Returns:
            The largest number of tokens of a prompt in this step. 0: no bound.
        """
        sat_out, self._sat_out = self._sat_out, False
        last, self._last_head = self._last_head, None
        first = head() if self._ranks else None
        if first is None or first.request_id == last:
            return 0
        after = [request for request in running if self._ranks.get(request.request_id, ()) > first.rank]
        if not after:
            return 0
        before = [scheduled_tokens(request) for request in running[: len(running) - len(after)]]
        left = budget - sum(before) - first.tokens
        self._sat_out = left < max([first.tokens, *before])  # the bound would be theirs, too
        if self._sat_out and sat_out:
            self._sat_out = False
            return 0
        self._last_head = first.request_id
        for request in after if self._sat_out else after[1:]:
            # vLLM's own mark for pipelined decodes; its scheduler counts the step before it looks.
            request.next_decode_eligible_step = step + 2
        return 0 if self._sat_out else left


def under_way(running: Iterable[Request]) -> list[Request]:
    """Return the turns whose prompt is not completely computed."""
    # `missing_tokens` without its call: this looks at each running turn of each step.
    return [request for request in running if request.num_tokens - request.num_computed_tokens > 1]


def missing_tokens(request: Request) -> int:
    """Return how many tokens are to be computed before the next one is generated.

    It is 1 for a turn that generates, and 0 where its next token is already being computed.
    """
    return int(request.num_tokens - request.num_computed_tokens)


def scheduled_tokens(request: Request) -> int:
    """Return how many tokens vLLM schedules for a running turn in a step without a bound, drafted ones included."""
    return max(0, int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens))


def drafted_tokens(running: Iterable[Request]) -> int:
    """Return how many tokens the turns that generate take in a step, beside one for each.

    Policies count one token for each. In a step without these tokens, the turns admitted last would get none.
    """
    return sum(max(0, scheduled_tokens(request) - 1) for request in running if missing_tokens(request) <= 1)
