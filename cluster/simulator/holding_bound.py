"""The fluid bound where nothing restores a lost context but computing it again: no host tier.

Between two turns a program's KV is held, which takes memory from the running turns, or it is not, and what the next
turn would have reused is computed again. Let H be the tokens held in the mean. Then, with the symbols of
:mod:`cluster.simulator.bound`, T a pause, L the tokens that the turn after it could reuse, x the part of them held:

    GPU     sum over programs of  w(capacity - H) + sum over pauses of (1 - x) · L · token   <= 1 second a second
    memory  sum over pauses of x · L · T                                                      <= H

The most programs that both admit is a linear program, bounded from above by its dual at any price q of a token's
memory for a second, in GPU seconds: a pause then costs min(L · token, q · L · T), and there are 1 + q · H seconds to
spend. The least of many q is taken, the largest of many H; each interval of H counts with its better end. Recomputed
tokens count only where the linear layers compute and do not just read weights, so that the two roofs are weighed
against each other as well: of max(s · weights, n · token) any mixture is a lower bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cluster.bench.workload import PlannedProgram
from cluster.simulator.bound import Floats, Work, served_per_s
from replicas.cost_model import CostModel

INTERVALS = 24
"""Of the part of the memory that is held."""
PAUSES_S = (0.0, *np.geomspace(0.1, 1000.0, 25).tolist(), float("inf"))
"""Pauses at which holding and computing again may cost the same: each gives a price."""
MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the roof that reads weights."""


@dataclass(frozen=True)
class HoldingBound:
    """Of one pool of programs on ``replicas`` devices without a host tier."""

    pool: Sequence[PlannedProgram]
    cost: CostModel
    max_batched_tokens: int
    max_num_seqs: int
    replicas: int = 1

    @property
    def capacity_per_s(self) -> float:
        """Programs per second that can all be served."""
        return self.replicas * max(
            min(budget_s / float(seconds.mean()) for budget_s, seconds in prices) for prices in self._duals
        )

    def goodput_per_s(self, rate_per_s: float) -> float:
        """Programs per second that can be good when ``rate_per_s`` are offered."""
        rate = rate_per_s / self.replicas
        return self.replicas * max(
            min(served_per_s(seconds, rate, budget_s) for budget_s, seconds in prices) for prices in self._duals
        )

    @cached_property
    def _duals(self) -> list[list[tuple[float, Floats]]]:
        """Of each interval of H, and of each price and mixture: the budget, and each program's seconds, ascending."""
        edges = np.linspace(0.0, self.cost.kv_capacity_tokens, INTERVALS + 1)
        return [list(self._prices(*interval)) for interval in pairwise(edges)]

    def _prices(self, held_least: float, held_most: float) -> Iterator[tuple[float, Floats]]:
        cost, work = self.cost, self._work
        tokens, pauses_s, owners = self._pauses
        room = cost.kv_capacity_tokens - held_least
        for mixture in MIXTURES:
            own = work.seconds(cost, self.max_batched_tokens, self.max_num_seqs, room, mixture)
            again = tokens * cost.token_s * (1.0 - mixture)
            for even_s in PAUSES_S:
                # At the price q = token_s / even_s, held tokens cost token_s · pause / even_s.
                price = cost.token_s / even_s if even_s else 0.0
                paid = np.minimum(again, price * tokens * pauses_s) if even_s else np.zeros_like(again)
                seconds = own + np.bincount(owners, weights=paid, minlength=len(own))
                yield 1.0 + price * held_most, np.sort(seconds)

    @cached_property
    def _work(self) -> Work:
        return Work.of(self.pool)

    @cached_property
    def _pauses(self) -> tuple[Floats, Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """(L, T, whose) of every pause of the pool."""
        rows = [
            (reusable, turn.pause_s, index)
            for index, program in enumerate(self.pool)
            for turn, reusable in zip(program.turns, _reusable_tokens(program), strict=False)
        ]
        columns = np.array(rows, float).reshape(-1, 3).T
        return columns[0], columns[1], columns[2].astype(np.int64)


def _reusable_tokens(program: PlannedProgram) -> list[int]:
    """After each turn but the last: tokens whose KV the next turn can use, without the prefix that programs share."""
    reusable: list[int] = []
    for turn, following, context in zip(program.turns, program.turns[1:], program.contexts(), strict=False):
        kept = turn.output_tokens if turn.kept_tokens == turn.output_tokens else 0
        own = context + kept - min(program.prefix_tokens, context)
        reusable.append(0 if following.reset else own)
    return reusable
