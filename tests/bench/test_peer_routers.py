"""Routers of others: what they are told of our replicas, and what is counted of them, without their packages."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from benchmarks import dynamo_router, peer_packages, peer_routers
from benchmarks.dynamo_router import Agreement
from benchmarks.dynamo_service import DynamoRouter, Event, Recorder
from benchmarks.live_against_simulated import SHAPE
from benchmarks.peer_routers import program_scheduling, programs_in, router_arguments, server_arguments
from cluster.config.schema import SloConfig
from cluster.core.clock import ManualClock
from cluster.core.program import ProgramIdentity
from cluster.offline.simulator.routing import Sent, SimulatedTurn
from replicas.presets import TINY_CPU
from replicas.virtual_engine import Shape, write_config_only_model
from replicas.virtual_replica import VirtualReplica

PROMPT = list(range(40, 140))


@pytest.fixture
def replica(tmp_path: Path) -> VirtualReplica:
    model = write_config_only_model(tmp_path, 8192)
    return VirtualReplica.build(None, TINY_CPU, SloConfig(), Shape(num_blocks=9), model, ManualClock())


def step(replica: VirtualReplica) -> None:
    assert replica.begin_step() is not None
    replica.end_step()


def stored(events: Sequence[Event]) -> int:
    return sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))


def test_events_of_ended_steps_and_of_the_current_one_are_taken_once_and_in_order(replica: VirtualReplica) -> None:
    recorder = Recorder(replica)
    replica.submit("a", PROMPT, 2, ProgramIdentity("a"), 0)
    step(replica)
    assert stored(recorder.take()) == 6
    assert recorder.take() == []
    step(replica)
    replica.submit("b", [7] * 50, 2, ProgramIdentity("b"), 0)
    assert replica.begin_step() is not None
    begun = recorder.take()
    assert stored(begun) == 3
    replica.end_step()
    while replica.begin_step() is not None:
        replica.end_step()
    replica.submit("c", [9] * 120, 1, ProgramIdentity("c"), 0)
    step(replica)
    kinds = [type(event).__name__ for event in recorder.take()]
    assert kinds[-1] == "BlockStored"
    assert "BlockRemoved" in kinds[:-1]


class Service:
    """Stands in for Dynamo's, and notes what it is notified of."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def apply(self, events: Sequence[Sequence[Event]]) -> None:
        self.seen.append(f"blocks {[stored(of_replica) for of_replica in events]}")

    def choose(self, turn_id: str, prompt: Sequence[int]) -> int:
        self.seen.append(f"choose {turn_id} {len(prompt)}")
        return 0

    def prefilled(self, turn_id: str) -> None:
        self.seen.append(f"prefilled {turn_id}")

    def ended(self, turn_id: str) -> None:
        self.seen.append(f"ended {turn_id}")


def simulated(program: str) -> SimulatedTurn:
    return SimulatedTurn(f"{program}.0", program, 0, PROMPT, ProgramIdentity(program))


def test_dynamo_is_notified_of_blocks_before_it_chooses_and_of_first_tokens_and_ends_once(
    replica: VirtualReplica,
) -> None:
    service = Service()
    router = DynamoRouter([replica], service)  # type: ignore[arg-type]
    assert router.route(simulated("a"), 0.0) == Sent(0, "dynamo")
    replica.submit("a.0", PROMPT, 3, ProgramIdentity("a"), 0)
    assert router.route(simulated("b"), 0.0) == Sent(0, "dynamo")
    step(replica)
    router.route(simulated("c"), 0.0)
    router.ended(simulated("a"), 0, 103, 1.0)
    router.route(simulated("d"), 0.0)
    assert service.seen == [
        "blocks [0]", "choose a.0 100",
        "blocks [0]", "choose b.0 100",
        "blocks [6]", "prefilled a.0", "prefilled b.0", "choose c.0 100",
        "ended a.0", "blocks [0]", "prefilled c.0", "choose d.0 100",
    ]  # fmt: skip


LOADS = [(32, 2), (16, 3), (64, 1)]
"""Tokens to compute and active blocks of three replicas: costs 4, 4 and 5 in blocks of 16."""


def agreement(theirs: Sequence[tuple[int, int]], to: int) -> Agreement:
    counted = Agreement()
    counted.count("a", 16, theirs, LOADS, to)
    return counted


def test_agreement_holds_only_if_loads_are_equal_and_the_choice_costs_least() -> None:
    assert agreement(LOADS, 0) == agreement(LOADS, 1) == Agreement(1, 1, 1, 1, 1)
    assert agreement(LOADS, 0).holds
    assert Agreement(100, 99, 99, 99).holds
    other_tokens, other_blocks = [(31, 2), *LOADS[1:]], [(32, 1), *LOADS[1:]]
    found = [agreement(other_tokens, 0), agreement(other_blocks, 0), agreement(LOADS, 2)]
    assert not any(one.holds for one in (*found, Agreement()))
    assert [(one.same_tokens, one.same_blocks, one.least_cost) for one in found] == [(0, 1, 1), (1, 0, 1), (1, 1, 0)]
    assert [len(one.examples) for one in found] == [1, 1, 0]


def test_vllm_router_gets_our_memory_and_costs_in_its_own_units() -> None:
    told = program_scheduling(TINY_CPU, 6400)
    assert told["program_scheduling_enable_key"] == "auto"
    assert told["token_capacity_per_dp_rank"] == 6400
    prefill, decode = told["prefill_cost_model"], told["decode_throughput_model"]
    thousands = 3.0
    seconds = prefill["intercept_seconds"] + prefill["linear_seconds_per_1k_tokens"] * thousands
    seconds += prefill["quadratic_seconds_per_1k_tokens_squared"] * thousands**2
    assert seconds == pytest.approx(TINY_CPU.prefill_s(3000), rel=0.01)
    step_s = decode["fixed_step_seconds"] + 8 * decode["batch_step_seconds_per_request"]
    step_s += 8 * 1000 * decode["context_step_seconds_per_token"]
    assert step_s == pytest.approx(TINY_CPU.decode_step_s(8, 8000), rel=0.02)


def test_only_the_program_scheduler_is_switched_on_and_all_replicas_have_the_same_limits() -> None:
    workers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    program = router_arguments("program", (3, 4), workers, TINY_CPU)
    assert "--enable-program-scheduling" in program
    assert "--policy" not in program
    assert json.loads(program[-1])["global_queue"] is True
    plain = router_arguments("cache_aware", (3, 4), workers, TINY_CPU)
    assert plain[-2:] == ["--policy", "cache_aware"]
    assert "--enable-program-scheduling" not in plain
    assert workers == plain[plain.index("--worker-urls") + 1 :][:2]
    server = server_arguments(Path("m"), 5)
    given = dict(pairwise(server))
    assert given["--num-gpu-blocks-override"] == str(SHAPE.num_blocks)
    assert given["--max-num-batched-tokens"] == str(SHAPE.max_num_batched_tokens)


def test_programs_are_counted_over_all_ranks() -> None:
    assert programs_in({"ranks": [{"programs": [{"program": "a"}, {"program": "b"}]}, {"programs": [{}]}]}) == 3


@pytest.mark.parametrize(("module", "needs"), [(dynamo_router, "dynamo._core"), (peer_routers, peer_routers.MODULE)])
def test_without_the_package_it_is_skipped_with_a_reason(
    module: object, needs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer_packages, "why_absent", lambda name: f"skipped: {name}")
    assert module.main([]) == peer_packages.SKIPPED  # type: ignore[attr-defined]
    assert capsys.readouterr().out == f"skipped: {needs}\n"


@pytest.mark.parametrize("seeds", ["", ",", "1,", "-1", "1.5", "x"])
def test_seeds_that_are_no_numbers_are_refused(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        dynamo_router.main([f"--seeds={seeds}"])
    assert stopped.value.code == 2
    assert "argument --seeds" in capsys.readouterr().err


def test_each_seed_has_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def simulated(settings: Any, run: Any, agreement: Any = None) -> Any:
        ran.append((run.router, run.seed))
        if agreement is not None:
            agreement.count("t", 16, [(1, 1)], [(1, 1)], 0)
        return run

    monkeypatch.setattr(peer_packages, "why_absent", lambda module: None)
    monkeypatch.setattr(dynamo_router, "with_dynamo", simulated)
    monkeypatch.setattr(dynamo_router, "simulate", simulated)
    monkeypatch.setattr(dynamo_router, "row_of", lambda subject, run: {"router": subject.router})
    monkeypatch.setattr(dynamo_router, "print_rows", lambda rows: None)
    assert dynamo_router.main(["--seeds=2,0", f"--json={tmp_path / 'rows.json'}"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["router"], row["seed"]) for row in rows] == ran
    assert [seed for _, seed in ran] == [2] * 5 + [0] * 5
    assert rows[0]["agreement"]["turns"] == 2
