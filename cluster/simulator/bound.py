"""The fluid bound: what no scheduler can exceed on a device of this cost model, however it orders and caches.

Take a program's work once, as if nothing were ever computed twice, waited for or divided badly:

    steps   s = max(K' / capacity, (P + D) / N, D / B)
    seconds w = s · overhead + D · sequence + max(s · weights, (P + D) · token) + max(K · context, Q · pair)

P: new prompt tokens; D: decodes, one for each output token but a turn's first; K: the contexts of all decodes added
up, K' without the prefixes that programs share; Q: pairs of a prompt token and one that it attends to. N tokens and B
sequences are the bounds of a step. The steps are as few as memory allows (the decodes of one step have their contexts
in memory together), so weights and overhead are shared as widely as can be; a sum of maxima is never below the maximum
of the sums, so each ``max`` is taken once, over the pool. A shared prefix is computed, and kept, by none of them.

Capacity is 1 / mean(w) programs per second and replica. At a higher rate goodput counts programs, so the bound serves
those with the least work and leaves the others: programs in ascending order of w until the device is full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.bench.workload import PlannedProgram
from cluster.simulator.work import turns_of
from replicas.cost_model import CostModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FluidBound:
    """Of one pool of programs on ``replicas`` devices."""

    seconds: tuple[float, ...]
    """Of each program of the pool, ascending."""
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
        """The bound for programs drawn evenly from ``pool``."""
        sums = np.array([_sums(program) for program in pool], float)
        prompts, decodes, contexts, own_contexts, pairs = sums.T
        tokens = prompts + decodes
        steps = _larger(own_contexts / cost.kv_capacity_tokens, tokens / max_batched_tokens, decodes / max_num_seqs)
        seconds = (
            steps * cost.overhead_s
            + decodes * cost.sequence_s
            + _larger(steps * cost.weights_s, tokens * cost.token_s)
            + _larger(contexts * cost.context_s, pairs * cost.pair_s)
        )
        return cls(tuple(np.sort(seconds).tolist()), replicas)

    @property
    def capacity_per_s(self) -> float:
        """Programs per second that can all be served."""
        return self.replicas * len(self.seconds) / sum(self.seconds)

    def goodput_per_s(self, rate_per_s: float) -> float:
        """Programs per second that can be good when ``rate_per_s`` are offered."""
        if rate_per_s <= self.capacity_per_s:
            return rate_per_s
        load = np.cumsum(self.seconds) * rate_per_s / len(self.seconds) / self.replicas
        served = int(np.searchsorted(load, 1.0, side="right"))
        before = float(load[served - 1]) if served else 0.0
        part = (1.0 - before) / (float(load[served]) - before)
        return rate_per_s * (served + part) / len(self.seconds)


def _larger(*terms: Floats) -> Floats:
    """Of sums over the pool, the one that is largest in all: it bounds them together from below."""
    return max(terms, key=lambda term: float(term.sum()))


def _sums(program: PlannedProgram) -> tuple[float, float, float, float, float]:
    """(P, D, K, K', Q). A turn's last token is sampled but not computed: it is new in the next turn's prompt."""
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
