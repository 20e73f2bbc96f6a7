"""Peers' schedulers as readable timelines: given these arrivals, expect this batch. SGLang's are in test_sglang."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from cluster.config.schema import SloConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import ConfigError
from cluster.core.program import USER_REPLY, Hints, ProgramIdentity
from cluster.core.registry import PEERS, POLICIES
from replicas.cost_model import CostModel
from replicas.peers import agentinfer
from replicas.peers.agentinfer import AgentInferParameters, calibration
from replicas.peers.peer import Peer
from replicas.presets import preset
from replicas.virtual_engine import Shape
from replicas.virtual_replica import VirtualReplica

COST = preset("opt-13b/h800")
BLOCK = 16


def installed() -> bool:
    try:
        return importlib.metadata.version(agentinfer.PACKAGE) == agentinfer.VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


needs_agentinfer = pytest.mark.skipif(
    not installed(), reason="agentinfer 0.2.0 is not installed (pip install --no-deps agentinfer==0.2.0)"
)


class Programs:
    """Programs on one virtual replica of a peer. Each step takes the seconds that it is given."""

    def __init__(self, peer: Peer, model: Path, **shape: int) -> None:
        self.clock = ManualClock()
        self.replica = VirtualReplica.build(peer, COST, SloConfig(), Shape(**shape), model, self.clock)
        self.scheduler: Any = self.replica.engine.scheduler
        self.contexts: dict[str, list[int]] = {}
        self.turns: dict[str, int] = {}

    def arrive(self, program: str, new_tokens: int, output: int = 1, *, tool: str = "ls", last: bool = False) -> str:
        """A turn of ``program`` arrives; its request id."""
        context = self.contexts.setdefault(program, [])
        context.extend(1000 + 10 * ord(program[0]) + i % 7 for i in range(new_tokens))
        number = self.turns[program] = self.turns.get(program, 0) + 1
        identity = ProgramIdentity(program_id=program, last_turn=last, hints=Hints(expected_tool=tool))
        turn = self.replica.submit(f"{program}{number}", context, output, identity, 0)
        self.contexts[program] = turn.request._all_token_ids
        return turn.request.request_id

    def step(self, seconds: float = 0.01) -> dict[str, int]:
        """One step; tokens scheduled per request."""
        if self.replica.begin_step() is None:
            return {}
        assert self.replica._in_flight is not None
        scheduled = dict(self.replica._in_flight.num_scheduled_tokens)
        self.clock.advance(seconds)
        self.replica.end_step()
        return scheduled

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()


@pytest.fixture
def made() -> Iterator[list[Programs]]:
    """At the end every block must be accounted for."""
    all_: list[Programs] = []
    yield all_
    for programs in all_:
        programs.run()
        programs.replica.check_integrity()


def test_no_peer_can_be_served() -> None:
    assert not PEERS.keys() & POLICIES.keys()


# --- vllm-priority ----------------------------------------------------------------------------------------------------


def test_an_earlier_program_goes_first_whenever_its_turn_arrives(made: list[Programs], tiny_config: Path) -> None:
    p = Programs(PEERS.load("vllm-priority")().build(COST), tiny_config, max_num_seqs=1)
    made.append(p)
    p.arrive("a", 20)
    p.step()
    p.clock.advance(1.0)
    p.arrive("b", 20, 3)
    p.step()
    p.clock.advance(1.0)
    p.arrive("c", 20)
    p.clock.advance(1.0)
    p.arrive("a", 20)
    assert [p.scheduler.requests[name].priority for name in ("b1", "c1", "a2")] == [1010, 2020, 0]
    assert [set(p.step()) for _ in range(4)] == [{"b1"}, {"b1"}, {"a2"}, {"c1"}]


def test_vllm_preempts_the_latest_program(made: list[Programs], tiny_config: Path) -> None:
    """Ten blocks: each of the three turns has three, and all need a fourth. By arrival, vLLM would preempt a2."""
    p = Programs(PEERS.load("vllm-priority")().build(COST), tiny_config, num_blocks=11)
    made.append(p)
    p.arrive("a", 32)
    p.step()
    for program in ("c", "b"):
        p.clock.advance(1.0)
        p.arrive(program, 32, 30)
    p.step()
    p.arrive("a", 1, 30)  # 34 tokens: three blocks. It is the last to be admitted, and of the earliest program.
    p.step()
    while not p.replica.preemptions:
        assert p.step()
    assert [request.request_id for request in p.scheduler.waiting] == ["b1"]


def test_a_program_is_forgotten_with_its_last_turn() -> None:
    peer = PEERS.load("vllm-priority")().build(COST)
    first = ProgramIdentity(program_id="a")
    assert [peer.fields(first, at_s).priority for at_s in (1.0, 2.0)] == [1000, 1000]
    assert peer.fields(replace(first, last_turn=True), 3.0).priority == 1000
    assert peer.fields(first, 4.0).priority == 4000


# --- vllm-v0 ----------------------------------------------------------------------------------------------------------


def test_decodes_wait_for_prompts_that_fit(made: list[Programs], tiny_config: Path) -> None:
    p = Programs(PEERS.load("vllm-v0")().build(COST), tiny_config, max_num_batched_tokens=100, max_num_seqs=8)
    made.append(p)
    p.arrive("a", 40, 20)
    assert p.step() == {"a1": 40}
    assert p.step() == {"a1": 1}
    p.arrive("b", 90, 3)
    p.arrive("c", 60, 3)
    assert [p.step() for _ in range(3)] == [{"b1": 90, "c1": 10}, {"c1": 50}, {"a1": 1, "b1": 1, "c1": 1}]


@pytest.mark.parametrize(("order", "first"), [("turn", "b1"), ("program", "a2")])
def test_the_turns_of_earlier_programs_can_come_first(
    made: list[Programs], tiny_config: Path, order: str, first: str
) -> None:
    p = Programs(PEERS.load("vllm-v0")(order=order).build(COST), tiny_config, max_num_seqs=1)
    made.append(p)
    p.arrive("a", 40)
    p.step()
    p.arrive("b", 40)
    p.clock.advance(1.0)
    p.arrive("a", 40)
    assert list(p.step()) == [first]


def test_decodes_go_on_where_the_prompt_does_not_fit(made: list[Programs], tiny_config: Path) -> None:
    """Sixteen blocks and none as a watermark: five are free when a has eleven."""
    p = Programs(PEERS.load("vllm-v0")().build(COST), tiny_config, num_blocks=17)
    made.append(p)
    p.arrive("a", 170, 4)
    assert p.step() == {"a1": 170}
    p.arrive("b", 100)
    assert [p.step() for _ in range(3)] == [{"a1": 1}] * 3
    assert p.step() == {"b1": 100}


def test_a_prompt_that_fits_but_cannot_begin_stops_the_decodes_for_every_other_step_only(
    made: list[Programs], tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Programs(PEERS.load("vllm-v0")().build(COST), tiny_config)
    made.append(p)
    p.arrive("a", 40, 8)
    p.step()
    manager = p.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    monkeypatch.setattr(
        manager,
        "allocate_slots",
        lambda request, *args, **kwargs: None if request.request_id == "b1" else allocate(request, *args, **kwargs),
    )
    p.arrive("b", 40)
    assert [p.step() for _ in range(4)] == [{}, {"a1": 1}, {}, {"a1": 1}]
    monkeypatch.undo()


# --- agentinfer -------------------------------------------------------------------------------------------------------


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(agentinfer, "version", missing)
    with pytest.raises(ConfigError, match="--policies agentinfer: the package agentinfer is not installed; pip inst"):
        AgentInferParameters().build(COST)
    monkeypatch.setattr(agentinfer, "version", lambda name: "0.3.0")
    with pytest.raises(ConfigError, match=r"agentinfer 0\.3\.0 is installed, not 0\.2\.0"):
        AgentInferParameters().build(COST)


def test_the_calibration_gives_back_the_cost_model() -> None:
    """A prefill of n tokens without a chunk: 1 ms + 0.1 ms · n + 0.01 µs · n (n + 1) / 2, the last as pairs."""
    cost = CostModel(
        name="by hand",
        kv_bytes_per_token=1,
        kv_capacity_tokens=9000,
        overhead_s=0.0005,
        sequence_s=0.0005,
        weights_s=0.004,
        token_s=1e-4,
        context_s=2e-6,
        pair_s=1e-8,
        swap_token_s=1e-5,
        step_tokens=9000,
    )
    found = calibration(cost)
    assert found["ttl_prefill_model_intercept_seconds"] == pytest.approx(0.001)
    assert found["ttl_prefill_model_linear_seconds_per_1k_tokens"] == pytest.approx(0.1 + 0.002 + 0.5e-5)
    assert found["ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared"] == pytest.approx(0.005)
    assert found["decode_step_fixed_seconds"] == pytest.approx(0.0045)
    assert found["decode_step_seconds_per_request"] == pytest.approx(0.0005)
    assert found["decode_step_seconds_per_context_token"] == pytest.approx(2.01e-6)


def peer_of_agentinfer() -> Peer:
    return AgentInferParameters().build(COST)


@needs_agentinfer
def test_a_program_that_does_not_fit_is_kept_back_until_the_next_cycle(made: list[Programs], tiny_config: Path) -> None:
    """64 blocks, 1024 tokens. a has 500; b needs 500, and the 100 that AgentInfer adds to each."""
    p = Programs(peer_of_agentinfer(), tiny_config, num_blocks=64)
    made.append(p)
    p.arrive("a", 500, 3)
    assert p.step() == {"a1": 500}
    p.arrive("b", 500, 2, last=True)
    assert p.replica.peer is not None
    assert list(p.replica.peer.retained_ids(p.scheduler)) == ["b1"]
    assert p.scheduler.requests.keys() == {"a1"}
    p.replica.check_integrity()
    assert [p.step() for _ in range(3)] == [{"a1": 1}, {"a1": 1}, {}], "a has ended, but the cycle is once a second"
    p.step(1.0)
    assert p.step() == {"b1": 500}
    assert p.replica._turns["b1"].admitted_s == pytest.approx(1.04)


@needs_agentinfer
def test_a_paused_program_resumes_at_its_arrival_if_it_fits(made: list[Programs], tiny_config: Path) -> None:
    """The time to live is 0 before a hundred pauses are known, so that a is paused at once."""
    p = Programs(peer_of_agentinfer(), tiny_config, num_blocks=64)
    made.append(p)
    p.arrive("a", 100)
    p.step()
    p.arrive("b", 10, 2)
    p.step()
    [a, _] = p.scheduler._agentcache.controller.registry.views()
    assert (a.ref.program_id, a.state.value) == ("default/a:lead", "paused")
    p.clock.advance(1.0)
    p.arrive("a", 30)
    assert p.step() == {"b1": 1, "a2": 131 - 6 * BLOCK}


@needs_agentinfer
@pytest.mark.parametrize(("tool", "last"), [("ls", True), (USER_REPLY, False)])
def test_a_response_without_a_tool_call_ends_the_program(
    made: list[Programs], tiny_config: Path, tool: str, last: bool
) -> None:
    p = Programs(peer_of_agentinfer(), tiny_config)
    made.append(p)
    p.arrive("a", 10)
    p.step()
    assert len(p.scheduler._agentcache.controller.registry.views()) == 1
    p.arrive("a", 10, tool=tool, last=last)
    p.step()
    assert p.scheduler._agentcache.controller.registry.views() == ()


@needs_agentinfer
def test_its_clock_is_the_virtual_one(made: list[Programs], tiny_config: Path) -> None:
    p = Programs(peer_of_agentinfer(), tiny_config)
    made.append(p)
    p.clock.advance(7.0)
    p.arrive("a", 10, 2)
    controller = p.scheduler._agentcache.controller
    assert controller._request_bindings["a1"].started_at_monotonic_s == 7.0
    assert controller._snapshot().observed_at_monotonic_s == 7.0


@needs_agentinfer
def test_it_sees_the_cached_prefix_of_a_turn_that_it_keeps_back(made: list[Programs], tiny_config: Path) -> None:
    """Once 100 s have passed since the pause, it looks at the prefixes after each turn that ends."""
    p = Programs(peer_of_agentinfer(), tiny_config, num_blocks=64)
    made.append(p)
    p.arrive("a", 200)
    p.step()
    p.arrive("b", 700, 2)
    p.clock.advance(1.0)
    assert p.step() == {}, "the first cycle pauses a, and the next one resumes b"
    p.clock.advance(1.0)
    assert p.step() == {"b1": 700}
    p.clock.advance(101.0)
    p.arrive("a", 200, 1)
    controller = p.scheduler._agentcache.controller
    assert list(controller.retained_request_ids) == ["a2"]
    p.step()
    p.step()
    tokens = {view.ref.program_id: view.tokens for view in controller.registry.views()}
    assert tokens["default/a:lead"].shared_prefix_tokens == 200 // BLOCK * BLOCK


@needs_agentinfer
def test_the_costs_are_calibrated_unless_the_defaults_are_asked_for(tiny_config: Path) -> None:
    for calibrated in (True, False):
        p = Programs(AgentInferParameters(calibrated=calibrated).build(COST), tiny_config, max_model_len=8192)
        config = p.scheduler._agentcache.controller.strategy.config
        assert (config.decode_step_fixed_seconds == COST.overhead_s + COST.weights_s) is calibrated
        assert (config.privileged_max_context_tokens == 8192) is calibrated
    assert isinstance(p.scheduler, Scheduler)
