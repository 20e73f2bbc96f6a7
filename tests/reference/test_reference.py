"""Policies against programs that were written from the papers alone: equal decisions on 10,000 random views each."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from cluster.core.lifecycle.machine import begin
from cluster.durations.table import DurationTable
from replicas.cost_model import CostModel
from replicas.policies.continuum import ContinuumParameters
from replicas.policies.mars import LampsParameters
from replicas.policy import Forecast, Hold, HoldView, KvPlace, LoadView, PauseView, Release, Swap, TurnView
from tests.reference import continuum, lamps
from tests.replica.policy_views import hold, load, pause, turn

VIEWS = 10_000
LAMPS = LampsParameters(cache_aware=False).build()
CONTINUUM = ContinuumParameters().build()
COST = CostModel(
    name="random views",
    kv_bytes_per_token=1e5,
    kv_capacity_tokens=60_000,
    overhead_s=0.004,
    sequence_s=2e-5,
    weights_s=0.012,
    token_s=3e-5,
    context_s=2e-7,
    pair_s=1e-9,
    swap_token_s=1e-5,
    swap_overhead_s=0.0005,
)


def random_load(random: Random) -> LoadView:
    at = load(
        host_tokens=random.choice((0, 800, 10**6)),
        running=random.randrange(200),
        running_tokens=random.randrange(60_000),
        waiting=random.randrange(20),
        step=1000,
        now_s=500.0,
    )
    return replace(at, facts=replace(at.facts, cost=COST))


def random_forecast(random: Random) -> Forecast:
    pause_s = random.choice((0.0, random.uniform(0, 0.2), random.uniform(0, 60)))
    return Forecast(random.uniform(0, 600), pause_s, random.uniform(0, 400), 500.0, 3.0)


def random_turn(random: Random) -> TurnView:
    begun = random.random() < 0.5
    program = replace(begin(f"t/{random.random()}", random.uniform(0, 500)), last_served_s=400.0 if begun else None)
    return turn(
        random_load(random) if random.random() < 0.2 else SHARED,
        program=program,
        forecast=random_forecast(random),
        tokens=random.randrange(1, 5000),
        preempted=(preempted := random.random() < 0.2),
        generated_tokens=random.randrange(300) if preempted else 0,
        queued_step=random.choice((random.randrange(880, 920), random.randrange(1001))),
        longest_wait_steps=random.choice((0, random.randrange(200))),
        kv=random.choice(tuple(KvPlace)),
    )


SHARED = random_load(Random(7))
KINDS = {Hold: "preserve", Swap: "swap", Release: "discard"}


def pairs(random: Random) -> Iterator[tuple[TurnView, TurnView]]:
    for _ in range(VIEWS):
        yield random_turn(random), random_turn(random)


def test_lamps_orders_as_its_paper() -> None:
    key, starving = LAMPS.order.key, 0
    for first, second in pairs(Random(1)):
        assert (key(first) < key(second)) == lamps.before(first, second)
        starving += lamps.starving(first)
    assert VIEWS / 10 < starving < VIEWS * 9 / 10


def test_lamps_handles_a_call_as_its_paper_at_the_pause_and_later() -> None:
    random, seen = Random(2), {"preserve": 0, "swap": 0, "discard": 0}
    for _ in range(VIEWS):
        at, context = random_load(random), random.randrange(1, 5000)
        begins = replace(pause(at, context), forecast=random_forecast(random))
        way = KINDS[type(LAMPS.pause.decide(begins))]
        assert way == lamps.at_pause(begins)
        seen[way] += 1
        lasts = hold(at, since_s=500 - random.uniform(0, 5), context_tokens=context, forecast=random_forecast(random))
        assert KINDS[type(LAMPS.pause.review(lasts))] == lamps.while_held(lasts)
    assert min(seen.values()) > VIEWS / 20


def random_pause(random: Random) -> tuple[PauseView, list[float], list[float]]:
    """Return a view, and the durations of its tool and of all tools that its table has seen."""
    own = [random.uniform(0, random.choice((1, 40))) for _ in range(random.randrange(9))]
    others = [random.uniform(0, 20) for _ in range(random.randrange(6))]
    table = DurationTable()
    for tool, durations in (("ls", own), ("cat", others)):
        for seconds in durations:
            table.observe(tool, seconds)
    view = pause(random_load(random), durations=table)
    program = replace(view.program, turns=random.randrange(1, 40))
    average = random.choice((None, random.uniform(1, 30)))
    return replace(view, program=program, average_turns=average), own, own + others


def test_continuum_pins_as_its_paper() -> None:
    random = Random(3)
    for _ in range(VIEWS):
        view, own, everything = random_pause(random)
        decision = CONTINUUM.pause.decide(view)
        assert isinstance(decision, Hold)
        assert decision.until_s - view.now_s == pytest.approx(continuum.ttl_s(view, own, everything), rel=1e-6)


def test_continuum_orders_and_gives_up_pins_as_its_paper() -> None:
    random, key = Random(4), CONTINUUM.order.key
    for first, second in pairs(random):
        assert (key(first) < key(second)) == continuum.before(first, second)
        pins: list[HoldView] = [
            hold(program=begin(f"t/{number}", random.uniform(0, 500))) for number in range(random.randrange(1, 6))
        ]
        assert min(pins, key=CONTINUUM.pause.victim_key) is continuum.victim(pins)


def test_the_comparison_notices_a_changed_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamps, "THRESHOLD", 101)
    with pytest.raises(AssertionError):
        test_lamps_orders_as_its_paper()
    monkeypatch.setattr(lamps, "transfer_s", lambda load, tokens: 1.01 * tokens * load.facts.cost.swap_token_s)
    with pytest.raises(AssertionError):
        test_lamps_handles_a_call_as_its_paper_at_the_pause_and_later()
    monkeypatch.setattr(continuum, "K", 6)
    with pytest.raises(AssertionError):
        test_continuum_pins_as_its_paper()
