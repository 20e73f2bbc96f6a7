"""Which prompts under way a step computes first.

vLLM gives a step's tokens to the running turns in the order in which they were admitted, and what is left to those that
wait. A long prompt, once begun, keeps every other one waiting until it is computed (head-of-line blocking). Here turns
that generate come first, which is a token for each, then prompts by their rank. While a turn waits that can be in time,
late prompts sit out every other step, so that it is admitted. They do not sit out every step, as it may be waiting for
memory.
"""

from collections.abc import Callable

from vllm.v1.request import Request

from replicas.policy import RankKey


class PrefillScheduling:
    """The order of one scheduler's prompts. Where the policy puts nobody off, vLLM's own order stays."""

    def __init__(self) -> None:
        self._late: frozenset[str] = frozenset()
        self._sat_out = False

    def tokens(self, running: list[Request]) -> int:
        """Tokens that the prompts under way still need computed, without those that are late."""
        return sum(missing_tokens(request) for request in _under_way(running) if request.request_id not in self._late)

    def order(
        self,
        running: list[Request],
        *,
        rank: Callable[[Request], RankKey],
        late_from: RankKey | None,
        in_time_waits: bool,
        step: int,
    ) -> bool:
        """Before a step: put ``running`` in order, and let late prompts sit the step out where others need it.

        Args:
            running: vLLM's list, sorted in place.
            rank: of a prompt under way.
            late_from: prompts of this rank and of later ones are late; None: none is.
            in_time_waits: a turn that is not late waits.
            step: the number of the step before.

        Returns:
            Whether other prompts are late than before.
        """
        prompts = _under_way(running) if late_from is not None else []
        ranks = {request.request_id: rank(request) for request in prompts}
        late = frozenset(name for name, key in ranks.items() if late_from is not None and key >= late_from)
        changed, self._late = late != self._late, late
        if prompts:  # stable: equals stay in the order of their admission, which those that generate are
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
    """Tokens to compute before the next one is generated; 1 of a turn that generates, 0 where that is under way."""
    return int(request.num_tokens - request.num_computed_tokens)
