"""The fluid bound: an upper bound on the goodput of every scheduler on a device with this cost model.

The bound counts each program's work once, without recomputation, waiting or badly divided steps:

    steps   s = max(K' / capacity, (P + D) / N, D / B)
    seconds w = s · overhead + D · sequence + max(s · weights, (P + D) · token) + K · (context + pair) + Q · pair

P is the number of new prompt tokens. D is the number of decodes, one for each output token except a turn's first. K is
the sum of the contexts of all decodes; K' is the same without the prefixes that programs share. Q is the number of
pairs of a prompt token and a token that it attends to. A step has at most N tokens and B sequences.

The number of steps is the least that memory allows, as the decodes of one step have their contexts in memory together.
So as many tokens as possible share the weights and the overhead. Each ``max`` is taken once, over the whole pool,
because a sum of maxima is never below the maximum of the sums. Prompts read their contexts too, which is left out, as
it depends on how they are divided into steps. Shared prefixes cost neither computation nor memory.

Capacity is 1 / mean(w) programs per second and replica. Goodput counts programs. At a higher rate, the bound therefore
serves programs in ascending order of w until the device is full, and drops the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cluster.offline.bench.workload import PlannedProgram, turns_of
from replicas.cost_model import CostModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FluidBound:
    """The fluid bound of one pool of programs on ``replicas`` devices."""

    seconds: tuple[float, ...]
    """GPU seconds of each program of the pool, ascending."""
    replicas: int

    @classmethod
    def of(
        cls,
        pool: Sequence[PlannedProgram],
        cost: CostModel,
        max_batched_tokens: int,
        max_num_seqs: int,
        replicas: int = 1,
    ) -> "FluidBound":
        """Compute the bound for programs drawn evenly from ``pool``."""
        seconds = Work.of(pool).seconds(cost, max_batched_tokens, max_num_seqs, cost.kv_capacity_tokens)
        return cls(tuple(np.sort(seconds).tolist()), replicas)

    @property
    def capacity_per_s(self) -> float:
        """Programs per second that can all be served."""
        return self.replicas * len(self.seconds) / sum(self.seconds)

    def goodput_per_s(self, rate_per_s: float) -> float:
        """Programs per second that can be good when ``rate_per_s`` are offered."""
        return self.replicas * served_per_s(np.array(self.seconds), rate_per_s / self.replicas)


@dataclass(frozen=True, slots=True)
class Work:
    """The sums of each program of a pool, with the symbols of this module. Each shape is [programs]."""

    prompts: Floats
    """P."""
    decodes: Floats
    """D."""
    contexts: Floats
    """K."""
    own_contexts: Floats
    """K'."""
    pairs: Floats
    """Q."""

    @classmethod
    def of(cls, pool: Sequence[PlannedProgram]) -> "Work":
        """Compute the sums of each program of ``pool`` with those below it, in order."""
        sums = [np.sum([_sums(each) for each in program.family()], axis=0) for program in pool]
        return cls(*np.array(sums, float).T)

    def seconds(
        self,
        cost: CostModel,
        max_batched_tokens: int,
        max_num_seqs: int,
        capacity_tokens: float,
        mixture: float | None = None,
    ) -> Floats:
        """Compute w, the GPU seconds of each program, shape [programs].

        Args:
            cost: cost model of the device.
            max_batched_tokens: N.
            max_num_seqs: B.
            capacity_tokens: tokens that running turns may have in memory.
            mixture: weight of the time to read weights in the bound of the linear layers; the rest is the weight of the
                compute time. None takes the larger of the two.
        """
        tokens = self.prompts + self.decodes
        steps = _larger(self.own_contexts / capacity_tokens, tokens / max_batched_tokens, self.decodes / max_num_seqs)
        reading, computing = steps * cost.weights_s, tokens * cost.token_s
        linear = _larger(reading, computing) if mixture is None else mixture * reading + (1 - mixture) * computing
        return (
            steps * cost.overhead_s
            + self.decodes * cost.sequence_s
            + linear
            + self.contexts * (cost.context_s + cost.pair_s)
            + self.pairs * cost.pair_s
        )


def served_per_s(seconds: Floats, rate_per_s: float, budget_s: float = 1.0) -> float:
    """Return the programs per second that can be served if those with the least work come first.

    Args:
        seconds: GPU seconds of each program of a pool, ascending.
        rate_per_s: rate at which programs are drawn evenly from the pool.
        budget_s: GPU seconds that are available in each second.
    """
    load = np.cumsum(seconds) * rate_per_s / len(seconds)
    served = int(np.searchsorted(load, budget_s, side="right"))
    if served == len(seconds):
        return rate_per_s
    before = float(load[served - 1]) if served else 0.0
    part = (budget_s - before) / (float(load[served]) - before)
    return float(rate_per_s * (served + part) / len(seconds))


def _larger(*terms: Floats) -> Floats:
    """Return the term with the largest sum over the pool, which is a lower bound of the sum of maxima."""
    return max(terms, key=lambda term: float(term.sum()))


def _sums(program: PlannedProgram) -> tuple[float, float, float, float, float]:
    """Return (P, D, K, K', Q) of a program. A turn's last token is not computed, so it is new in the next prompt."""
    prompts = decodes = contexts = own_contexts = pairs = 0.0
    for index, work in enumerate(turns_of(program)):
        shared = min(program.prefix_tokens, work.new_tokens) if index == 0 else 0
        before = program.turns[index - 1] if index and not program.turns[index].reset else None
        sampled = 1 if before is not None and before.kept_tokens == before.output_tokens else 0
        new = work.new_tokens - shared + sampled
        prompts += new
        pairs += new * (2 * work.prompt_tokens - new + 1) / 2
        steps = work.output_tokens - 1
        decodes += steps
        grown = steps * (steps + 1) / 2
        contexts += steps * work.prompt_tokens + grown
        own_contexts += steps * (work.prompt_tokens - min(program.prefix_tokens, work.prompt_tokens)) + grown
    return prompts, decodes, contexts, own_contexts, pairs


INTERVALS = 24
"""Number of intervals into which the amount of held memory is divided."""
PAUSES_S = (0.0, *np.geomspace(0.1, 1000.0, 25).tolist(), float("inf"))
"""Break-even pauses in seconds, at which holding costs as much as recomputation. Each gives a price."""
MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the time to read weights, see ``mixture`` of `Work.seconds`."""


@dataclass(frozen=True)
class HoldingBound:
    """The fluid bound of one pool on ``replicas`` devices without a host tier, where lost KV must be recomputed.

    Between two turns, a program's KV is either held, which takes memory from running turns, or it is recomputed for the
    next turn. Let H be the mean number of held tokens, T a pause, L the tokens that the turn after it could reuse, and
    x the held part of them. Then, with the symbols of this module:

        GPU     sum over programs of  w(capacity - H) + sum over pauses of (1 - x) · L · token   <= 1 second a second
        memory  sum over pauses of x · L · T                                                      <= H

    The largest number of programs under both constraints is a linear program. Its dual at any price q is an upper
    bound, where q is the price in GPU seconds of a token's memory for one second. A pause then costs
    min(L · token, q · L · T), and the budget is 1 + q · H seconds. The bound is the minimum over many q and the maximum
    over many intervals of H, each of which counts with its better end. Recomputed tokens cost time only if the linear
    layers are bound by compute and not by reading weights. Any mixture of the two is a lower bound of
    max(s · weights, n · token), so the mixture is minimized over as well.
    """

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
        """For each interval of H, and for each price and mixture: the budget, and each program's seconds, ascending."""
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
                yield float(1.0 + price * held_most), np.sort(seconds)

    @cached_property
    def _work(self) -> Work:
        return Work.of(self.pool)

    @cached_property
    def _pauses(self) -> tuple[Floats, Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """L, T and the index of the program of every pause of the pool, each with the shape [pauses]."""
        rows = [
            # How long children take is not known before they run. Without a length, to hold costs nothing.
            (reusable, 0.0 if turn.children else turn.pause_s, index)
            for index, tree in enumerate(self.pool)
            for program in tree.family()
            for turn, reusable in zip(program.turns, _reusable_tokens(program), strict=False)
        ]
        columns = np.array(rows, float).reshape(-1, 3).T
        return columns[0], columns[1], columns[2].astype(np.int64)


def _reusable_tokens(program: PlannedProgram) -> list[int]:
    """Return, for each turn but the last, the tokens whose KV the next turn can reuse, without shared prefixes."""
    reusable: list[int] = []
    for turn, following, context in zip(program.turns, program.turns[1:], program.contexts(), strict=False):
        kept = turn.output_tokens if turn.kept_tokens == turn.output_tokens else 0
        own = context + kept - min(program.prefix_tokens, context)
        reusable.append(0 if following.reset else own)
    return reusable
