"""Turns of LoRA adapters, of which vLLM runs one or two at a time. 100 tokens of a step take 10 ms (`policy_views`)."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from zlib import crc32

import pytest
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from cluster.config.schema import SloConfig
from cluster.core.program import Hints, ProgramIdentity
from replicas.load_shedding import shedding_of
from replicas.virtual_engine import VirtualEngine
from tests.replica.policy_views import COST
from tests.replica.test_timelines import SYNC_AND_ASYNC, Programs

Replica = Callable[..., VirtualEngine]
STEP_S = 0.01


class Adapters(Programs):
    """A replica on which 10 ms pass with each step. The first letter of a turn names its adapter; `_` is the model."""

    def __init__(self, engine: VirtualEngine, max_loras: int = 1) -> None:
        super().__init__(engine)
        self.scheduler.lora_config = LoRAConfig(max_lora_rank=8, max_loras=max_loras)
        self.scheduler.facts = replace(self.scheduler.facts, cost=COST, slo=SloConfig(ttft_s=1.0), max_tokens=1000)

    def submit(self, name: str, prompt: int, output: int, priority: int = 0) -> str:
        identity = ProgramIdentity(name, last_turn=True, hints=Hints(priority=priority, expected_output_tokens=output))
        request = self.engine.submit(name, [2000 + crc32(name.encode()) % 999] * prompt, output, identity)
        if not name.startswith("_"):
            request.lora_request = LoRARequest(name[0], ord(name[0]), "/nowhere")
        return request.request_id

    def pass_s(self, seconds: float) -> list[dict[str, int]]:
        """Step for so long. Return the tokens that each step scheduled."""
        steps = []
        for _ in range(round(seconds / STEP_S)):
            self.clock.advance(STEP_S)
            steps.append(self.step())
        return steps


@pytest.fixture
def adapters(replica: Replica) -> Callable[..., Adapters]:
    def make(asynchronous: bool = False, max_loras: int = 1, num_blocks: int = 640, **parameters: float) -> Adapters:
        return Adapters(replica("caesura", asynchronous, num_blocks, **parameters), max_loras)

    return make


Make = Callable[..., Adapters]


@pytest.mark.parametrize("max_loras", [1, 2])
@SYNC_AND_ASYNC
def test_turns_of_the_adapters_that_run_do_not_pass_a_turn_for_ever(
    adapters: Make, asynchronous: bool, max_loras: int
) -> None:
    """A turn is due after a half of the longest wait. The turns that run then take less than 0.5 s."""
    p = adapters(asynchronous, max_loras, max_wait_s=1.6)
    others = "ab"[:max_loras]
    waiting, served_s = "", inf
    for number in range(300):
        if number % 10 == 0:
            for name in others:
                p.submit(f"{name}{number}", 20, 30)
            p.submit(f"_{number}", 20, 30)
        if number == 20:
            waiting = p.submit("z", 20, 30)
        for scheduled in p.pass_s(STEP_S):
            if waiting in scheduled:
                served_s = min(served_s, p.clock.now_s())
    assert 0.2 + 0.8 < served_s < 0.2 + 0.8 + 0.5
    assert waiting not in p.scheduler.requests
    p.pass_s(1.0)
    assert not p.scheduler.has_unfinished_requests(), "the others went on"


def test_a_slot_is_not_freed_before_a_turn_is_due_and_only_one_is(adapters: Make) -> None:
    p = adapters(max_loras=2, max_wait_s=1.6)
    for name in ("a1", "a2", "b1"):
        p.submit(name, 20, 100)
    p.pass_s(0.1)
    p.submit("z", 20, 5)
    p.pass_s(0.5)
    assert {"a3", "b2"} == {p.submit("a3", 20, 5), p.submit("b2", 20, 5)} & p.pass_s(0.02)[-1].keys()
    p.pass_s(0.35)
    later = {p.submit("a4", 20, 5), p.submit("b3", 20, 5), p.submit("_", 20, 5)}
    assert later & p.pass_s(0.02)[-1].keys() == {"a4", "_"}, "b has fewer turns that run"
    assert "z" in {name for step in p.pass_s(0.5) for name in step}


def test_no_room_is_made_for_a_turn_without_a_slot(adapters: Make) -> None:
    """It would rank first. Of 100 tokens, the turn that generates has one, and the prompt the others."""
    p = adapters()
    p.submit("_", 10, 200)
    p.pass_s(0.01)
    p.submit("a", 2000, 5)
    p.pass_s(0.02)
    p.submit("z", 60, 5)
    assert [step.get("a") for step in p.pass_s(0.1)] == [99] * 10
    p.submit("_2", 40, 5)
    assert p.pass_s(0.01)[0] == {"_": 1, "_2": 40, "a": 59}, "but for the next one"


def test_a_prompt_that_waits_for_a_step_keeps_its_slot(adapters: Make) -> None:
    """vLLM counts the adapters of a step, and fails where turns of more of them run."""
    p = adapters()
    p.submit("_", 10, 200)
    p.pass_s(0.01)
    p.submit("a", 2000, 5)
    p.pass_s(0.02)
    p.submit("_2", 90, 5)
    p.submit("z", 5, 5)
    assert "a" not in p.pass_s(0.01)[0]
    assert "z" not in {name for step in p.pass_s(0.1) for name in step}


def test_nobody_is_preempted_for_a_turn_without_a_slot(adapters: Make) -> None:
    p = adapters()
    for name in ("max_num_running_reqs", "max_num_active_reqs"):  # the latter in newer versions of vLLM
        if hasattr(p.scheduler, name):
            setattr(p.scheduler, name, 2)
    p.submit("a", 20, 300)
    p.submit("_batch", 100, 400, priority=1)
    p.pass_s(0.2)
    p.submit("z", 20, 5)
    p.pass_s(0.3)
    assert p.scheduler.requests["_batch"].num_preemptions == 0
    p.submit("a2", 20, 5)
    p.pass_s(0.1)
    assert p.scheduler.requests["_batch"].num_preemptions == 1


def test_a_turn_without_a_slot_stops_new_programs_only_once_it_is_due(adapters: Make) -> None:
    """The longest wait is 120 s."""
    p = adapters()
    p.submit("a", 20, 100)
    p.pass_s(0.1)
    p.submit("z", 20, 5)
    p.step()
    p.clock.advance(20.0)
    assert shedding_of(p.scheduler).from_s == inf
    p.clock.advance(41.0)
    assert shedding_of(p.scheduler).from_s < inf
