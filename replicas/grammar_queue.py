"""The queue of grammars that an engine compiles: small ones have a thread of their own, and tenants take turns.

vLLM compiles in the order of arrival, also for requests that have ended. A few large schemas then delay those of all
others. A compilation in the engine cannot be stopped; `replicas.grammar_trials` has bounded it before.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cluster.api.structured_output_limits import SMALL_S, estimated_s
from cluster.core.program import tenant_of
from replicas.fair_threads import FairThreads

COMPILED_S_KEY = "caesura_compiled_s"
"""The key of ``SamplingParams.extra_args`` whose value is how long the grammar's trial took, in seconds."""


class GrammarQueue:
    """In place of the executor of vLLM's `StructuredOutputManager`. Its threads end with the process.

    Args:
        workers: number of threads for compilations that are not small.
    """

    def __init__(self, workers: int) -> None:
        self._small, self._large = FairThreads(1), FairThreads(workers)

    def submit(self, create: Callable[[Any], Any], request: Any) -> "Future[Any]":
        """Call ``create`` with vLLM's ``request``, unless the request has ended before its turn comes."""
        threads = self._small if _seconds(request) <= SMALL_S else self._large
        return threads.submit(tenant_of(request.session_id or ""), lambda: create(request), request.is_finished)


def _seconds(request: Any) -> float:
    """Return how long the compilation takes, as measured, else as estimated."""
    params = request.sampling_params
    measured: float | None = ((params.extra_args if params else None) or {}).get(COMPILED_S_KEY)
    return estimated_s(request.structured_output_request.structured_output_key[1]) if measured is None else measured
