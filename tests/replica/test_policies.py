"""Contracts of every registered policy: tested by being registered."""

import random
from pathlib import Path

import pytest

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.lifecycle.machine import begin
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.registry import POLICIES
from cluster.durations.table import DurationTable
from replicas.hold_table import HoldOrigin
from replicas.policy import (
    BudgetPolicy,
    Claimant,
    Forecast,
    HoldView,
    LoadView,
    OrderPolicy,
    PausePolicy,
    Policy,
    ReplicaFacts,
)
from replicas.presets import preset
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine

EVERY_POLICY = pytest.mark.parametrize("name", sorted(POLICIES))
STEPS = 600


def policy(name: str) -> Policy:
    built: Policy = POLICIES.load(name)().build()
    return built


@EVERY_POLICY
def test_it_answers_to_its_name(name: str) -> None:
    assert policy(name).name == name


FACTS = ReplicaFacts(preset("opt-13b/h800"), SloConfig(), capacity_tokens=50_000, max_tokens=512)


def load(free_tokens: int = 0, held_tokens: int = 0) -> LoadView:
    used = FACTS.capacity_tokens - free_tokens - held_tokens
    return LoadView(FACTS, 9.0, 100, 3, used, 2, held_tokens, free_tokens)


@EVERY_POLICY
def test_a_starved_turn_may_break_any_hold(name: str) -> None:
    """Otherwise a replica full of holds would stop for ever."""
    pause = policy(name).pause
    forecast = Forecast(100.0, 1.0, 50.0, 500.0, 3.0)
    for owner_waits in (False, True):
        hold = HoldView(begin("t/p", 0.0), forecast, load(), DurationTable(), 100, 0.0, 1e9, owner_waits)
        assert pause.yields(hold, Claimant.STARVED)
        assert isinstance(pause.victim_key(hold), tuple)


@EVERY_POLICY
def test_a_budget_is_between_one_token_and_vllms_own(name: str) -> None:
    budget = policy(name).budget
    for free, held in [(0, 0), (10_000, 0), (0, 10_000)]:
        assert 1 <= budget.tokens(load(free, held)) <= FACTS.max_tokens


@EVERY_POLICY
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_program_finishes_and_every_block_comes_back(name: str, asynchronous: bool, tiny_config: Path) -> None:
    settings = SchedulerSettings(policy=PolicyConfig(name=name))
    shape = Shape(num_blocks=48, max_num_seqs=6, max_num_batched_tokens=128)
    engine = VirtualEngine(AgentScheduler, tiny_config, shape, settings, asynchronous)
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    clock = scheduler.clock = ManualClock()
    rng = random.Random(7)
    waiting: list[tuple[float, int, int, list[int]]] = []  # when the next turn comes, program, turns left, context
    finished, running, born = 0, {}, 0
    for step in range(STEPS):
        if rng.random() < 0.15 and born < 40:
            waiting.append((clock.now_s(), born, rng.randrange(1, 5), [100 + born]))
            born += 1
        due = [turn for turn in waiting if turn[0] <= clock.now_s()]
        waiting = [turn for turn in waiting if turn[0] > clock.now_s()]
        for _, program, left, context in due:
            context.extend(rng.randrange(200, 2000) for _ in range(rng.randrange(1, 120)))
            identity = ProgramIdentity(
                program_id=f"p{program}", last_turn=left == 1, hints=Hints(expected_tool=rng.choice(["ls", "pytest"]))
            )
            output = rng.randrange(1, 12)
            request = engine.submit(f"p{program}-{left}", context, output, identity)
            running[request.request_id] = (request, len(context), output, program, left)
        engine.step()
        clock.advance(0.05)
        scheduler.check_integrity()
        for request_id, (request, prompt, output, program, left) in list(running.items()):
            if request.is_finished():
                del running[request_id]
                assert request.num_tokens == prompt + output, "a turn lost or gained tokens"
                if left > 1:
                    pause_s = rng.choice([0.01, 0.3, 5.0])
                    waiting.append((clock.now_s() + pause_s, program, left - 1, list(request._all_token_ids)))
                else:
                    finished += 1
        if step > 300 and finished == born:
            break
    assert (finished, born) == (40, 40)
    engine.run()
    assert scheduler.reset_prefix_cache()
    assert engine.free_blocks() == shape.num_blocks - 1


@EVERY_POLICY
def test_what_a_client_asks_to_hold_is_held_for_so_long(name: str, tiny_config: Path) -> None:
    """Also where memory is short, and while the policy reviews its holds. `vllm` and `plas` hold nothing."""
    settings = SchedulerSettings(policy=PolicyConfig(name=name))
    engine = VirtualEngine(AgentScheduler, tiny_config, Shape(num_blocks=64), settings)
    scheduler, clock = engine.scheduler, ManualClock()
    assert isinstance(scheduler, AgentScheduler)
    scheduler.clock = clock
    for program, hints in (("asks", Hints(retention_s=60.0)), ("does_not", Hints())):
        engine.submit(program, [3000 + len(program)] * 160, 1, ProgramIdentity(program, hints=hints))
        engine.run()
    held, other = (scheduler.holds.get(f"default/{program}") for program in ("asks", "does_not"))
    assert other is None or other.origin is HoldOrigin.POLICY
    if name in ("vllm", "plas"):
        assert held is None
        return
    assert held is not None
    assert (held.until_s, held.origin) == (60.0, HoldOrigin.ASKED)
    engine.submit("running", range(4000, 4500), 100, ProgramIdentity("other", last_turn=True))
    for _ in range(50):
        clock.advance(1.0)
        engine.step()
    assert scheduler.holds.get("default/asks") == held
    clock.advance(10.0)
    engine.step()
    assert scheduler.holds.get("default/asks") is None
    engine.run()


def test_the_protocols_are_met() -> None:
    """Compile-time conformance: mypy reads these assignments."""
    for name in POLICIES:
        order: OrderPolicy = policy(name).order
        pause: PausePolicy = policy(name).pause
        budget: BudgetPolicy = policy(name).budget
        assert all((order, pause, budget))
