"""Views for tests of policies, of a replica whose costs are easy to work out by hand.

10 ms for an iteration of up to 100 tokens, 0.1 ms for each token of a longer one, 10 µs to move one token's KV over
the host link, and attention for nothing. So T_fwd(1000) = 0.1 s, T_fwd = 0.01 s, T_swap(1000) = 0.01 s, S = 100.
"""

from dataclasses import replace

from cluster.config.schema import SloConfig
from cluster.core.lifecycle.machine import begin
from cluster.core.program import Hints
from cluster.core.registry import POLICIES
from cluster.durations.statistics import DurationStatistics
from cluster.durations.table import DurationTable
from replicas.cost_model import CostModel
from replicas.policy import Forecast, HoldView, KvPlace, LoadView, PauseView, Policy, ReplicaFacts, TurnView

COST = CostModel(
    name="by hand",
    kv_bytes_per_token=1000.0,
    kv_capacity_tokens=10_000,
    overhead_s=0.0,
    sequence_s=0.0,
    weights_s=0.01,
    token_s=0.0001,
    context_s=0.0,
    pair_s=0.0,
    swap_token_s=0.00001,
)


def load(host_tokens: int = 0, max_tokens: int = 1000, **changes: float) -> LoadView:
    facts = ReplicaFacts(COST, SloConfig(), COST.kv_capacity_tokens, max_tokens, host_tokens)
    view = LoadView(facts, 100.0, 500, 10, 5000, 3, 2000, 3000)
    return replace(view, **changes)  # type: ignore[arg-type]


def forecast(output: float = 100.0, pause_s: float = 2.0, returned: float = 50.0) -> Forecast:
    return Forecast(output, pause_s, returned, 500.0, 3.0)


def turn(
    at: LoadView | None = None, context_tokens: int = 0, last_served_s: float | None = None, **changes: object
) -> TurnView:
    program = replace(begin("t/p", 40.0), context_tokens=context_tokens, last_served_s=last_served_s)
    view = TurnView(program, Hints(), forecast(), at or load(), 98.0, 490, 1000, 0, False, KvPlace.NONE)
    view = replace(view, bounds=view.load.facts.slo.bounds)
    return replace(view, **changes)  # type: ignore[arg-type]


def pause(
    at: LoadView | None = None, context: int = 1000, durations: DurationTable | None = None, **expected: float
) -> PauseView:
    table = durations or DurationTable()
    return PauseView(begin("t/p", 40.0), Hints(), forecast(**expected), at or load(), ("ls",), context, table, None)


def hold(at: LoadView | None = None, since_s: float = 99.0, until_s: float = 101.0, **changes: object) -> HoldView:
    view = HoldView(
        begin("t/p", 40.0), forecast(), at or load(), DurationTable(), 1000, since_s, until_s, owner_waits=False
    )
    view = replace(view, bounds=view.load.facts.slo.bounds)
    return replace(view, **changes)  # type: ignore[arg-type]


def policy(name: str) -> Policy:
    built: Policy = POLICIES.load(name)().build()
    return built


def observed(*seconds: float) -> DurationStatistics:
    statistics = DurationStatistics()
    for duration in seconds:
        statistics.observe(duration)
    return statistics
