"""Orders the prompts that a step computes.

vLLM gives a step's tokens to the running turns in the order of their admission, and the rest to waiting turns. A long
prompt that has begun blocks all others until it is computed (head-of-line blocking). Here turns that generate come
first, with one token each, and then prompts by their rank. While a turn waits that can still meet its SLO, late prompts
skip every other step, so that the turn is admitted. They do not skip every step, because the turn may be waiting for
memory.
"""

from collections.abc import Callable

from vllm.v1.request import Request

from replicas.policy import IsLate, RankKey


class PrefillScheduling:
    """The order of one scheduler's prompts. vLLM's own order stays where the policy has no late prompts."""

    def __init__(self) -> None:
        self._late: frozenset[str] = frozenset()
        self._sat_out = False

    def is_late(self, request_id: str) -> bool:
        """Return whether this is a running prompt that is late."""
        return request_id in self._late

    def tokens(self, running: list[Request]) -> int:
        """Return how many tokens the running prompts still need computed, without the prompts that are late."""
        return sum(missing_tokens(request) for request in _under_way(running) if request.request_id not in self._late)

    def order(
        self,
        running: list[Request],
        *,
        rank: Callable[[Request], RankKey],
        is_late: IsLate | None,
        in_time_waits: bool,
        step: int,
    ) -> bool:
        """Sort ``running`` before a step, and let late prompts skip the step where a turn in time waits.

        Args:
            running: vLLM's list, which is sorted in place.
            rank: returns the rank of a running prompt.
            is_late: whether prompts of a rank are late. None: no prompt is late.
            in_time_waits: whether a turn that is not late waits.
            step: number of the previous step.

        Returns:
            Whether the set of late prompts has changed.
        """
        prompts = _under_way(running) if is_late is not None else []
        ranks = {request.request_id: rank(request) for request in prompts}
        late = frozenset(name for name, key in ranks.items() if is_late is not None and is_late(key))
        changed, self._late = late != self._late, late
        if prompts:  # stable: turns that generate have equal ranks and stay in the order of their admission
            running.sort(key=lambda request: ranks.get(request.request_id, ()))
        self._sat_out = bool(late) and not self._sat_out and in_time_waits
        if self._sat_out:
            for request in prompts:
                if request.request_id in late:
                    # vLLM's own mark for pipelined decodes; its scheduler counts the step before it looks.
                    request.next_decode_eligible_step = step + 2
        return changed


def _under_way(running: list[Request]) -> list[Request]:
    return [request for request in running if missing_tokens(request) > 1]


def missing_tokens(request: Request) -> int:
    """Return how many tokens are to be computed before the next one is generated.

    It is 1 for a turn that generates, and 0 where its next token is already being computed.
    """
    return int(request.num_tokens - request.num_computed_tokens)
