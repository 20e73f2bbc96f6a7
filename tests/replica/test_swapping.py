"""Timelines of the host tier: the real scheduler and vLLM's own connector, on a link that takes as long as a test says.

A replica has 63 usable blocks of 16 tokens, its host 400. The pause policy swaps whatever pauses.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from cluster.config.schema import PolicyConfig
from cluster.core.clock import ManualClock
from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.lifecycle.machine import Phase
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.turn import pack_ids
from replicas.control import dispatch, snapshot
from replicas.host_tier import kv_transfer_config
from replicas.policy import (
    Claimant,
    Hold,
    HoldView,
    KvPlace,
    PauseDecision,
    PauseView,
    RankKey,
    Swap,
)
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.swapping import FETCHED_HOLD_S
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink

BLOCK = 16
BLOCKS = 64
SYNC_AND_ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@dataclass(frozen=True)
class AlwaysSwap:
    """Swap at the pause, or hold first and swap at the first look."""

    hold_first: bool = False
    review_steps: int | None = 1

    def decide(self, pause: PauseView) -> PauseDecision:
        return Hold(pause.now_s + 100.0) if self.hold_first else Swap("test")

    def review(self, hold: HoldView) -> PauseDecision:
        return Swap("test")

    def victim_key(self, hold: HoldView) -> RankKey:
        return (hold.since_s,)

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        return claimant is not Claimant.WAITING


class Tiered:
    """Programs on one replica with a host tier."""

    def __init__(self, model: Path, asynchronous: bool, host_blocks: int, pause: AlwaysSwap) -> None:
        self.clock, self.load_s = ManualClock(), 0.0
        settings = SchedulerSettings(policy=PolicyConfig(name="vllm"))
        self.engine = VirtualEngine(
            AgentScheduler,
            model,
            Shape(num_blocks=BLOCKS, host_blocks=host_blocks),
            settings,
            asynchronous,
            VirtualLink(self.clock, lambda tokens: self.load_s, BLOCK),
            kv_transfer_config,
        )
        self.scheduler: AgentScheduler = self.engine.scheduler  # type: ignore[assignment]
        self.scheduler.clock = self.clock
        self.scheduler.policies = replace(self.scheduler.policies, pause=pause)
        self.contexts: dict[str, list[int]] = {}
        self.turns: dict[str, int] = {}

    def arrive(self, program: str, new_tokens: int, output: int = 1, last: bool = False) -> str:
        first = 1000 + 10 * ord(program[0])
        context = list(self.contexts.get(program, [first]))
        context.extend(first + i % 7 for i in range(new_tokens - (0 if program in self.turns else 1)))
        number = self.turns[program] = self.turns.get(program, 0) + 1
        identity = ProgramIdentity(program_id=program, last_turn=last, hints=Hints(expected_tool="ls"))
        request = self.engine.submit(f"{program}{number}", context, output, identity)
        self.contexts[program] = request._all_token_ids
        return request.request_id

    def step(self) -> dict[str, int]:
        return dict(self.engine.step().num_scheduled_tokens)

    def drain(self) -> None:
        """Until nothing is left to do; transfers take no time meanwhile."""
        for _ in range(2000):
            if not self.scheduler.has_requests():
                break
            self.clock.advance(self.load_s)
            self.step()
        self.engine.run()
        self.scheduler.check_integrity()

    def turn(self, program: str, new_tokens: int, output: int = 1, last: bool = False) -> None:
        self.arrive(program, new_tokens, output, last)
        self.drain()

    def overwrite(self) -> None:
        """Somebody else uses all of the device's memory."""
        self.turn("!", 63 * BLOCK - 1, last=True)
        del self.contexts["!"], self.turns["!"]

    def control(self, operation: str, program: str) -> dict[str, Any]:
        return dispatch(self.scheduler, operation, {"key": f"default/{program}"})

    def phase(self, program: str) -> Phase | None:
        state = self.scheduler.programs.get(f"default/{program}")
        return state.phase if state else None

    def cached(self, program: str) -> list[int]:
        story = self.scheduler.programs.to_public_dict(f"default/{program}")
        assert story is not None
        return [turn["cached_tokens"] for turn in story["turns"]]

    def fetching(self, program: str, tokens: int = 100) -> "Tiered":
        """``program`` has paused, lost its device memory, and its fetch has begun."""
        self.turn(program, tokens, 5)
        self.overwrite()
        self.load_s = 1.0
        assert self.control("tool_finished", program) == {"held": False, "fetching": True}
        self.step()
        return self

    @property
    def all_free(self) -> bool:
        return self.engine.free_blocks() == BLOCKS - 1


Make = Callable[..., Tiered]


@pytest.fixture
def tiered(tiny_config: Path) -> Iterator[Make]:
    """Makes replicas; at the end every block must be accounted for, on the device and on the host."""
    made: list[Tiered] = []

    def make(asynchronous: bool = False, host_blocks: int = 400, hold_first: bool = False) -> Tiered:
        made.append(Tiered(tiny_config, asynchronous, host_blocks, AlwaysSwap(hold_first)))
        return made[-1]

    yield make
    for t in made:
        t.drain()
        assert t.scheduler.reset_prefix_cache(reset_connector=True)
        t.scheduler.check_integrity()
        assert t.all_free, "a block leaked"
        assert t.scheduler.swapping.used_tokens == 0


@SYNC_AND_ASYNC
def test_a_swapped_program_is_fetched_when_its_tool_has_finished(tiered: Make, asynchronous: bool) -> None:
    t = tiered(asynchronous)
    t.turn("a", 100, 5)
    assert (t.phase("a"), t.all_free) == (Phase.SWAPPED, True)
    # 104 tokens have KV (the 105th was sampled, not computed): 6 whole blocks.
    assert t.scheduler.swapping.tokens_of("default/a") == 96
    t.overwrite()
    assert t.control("tool_finished", "a") == {"held": False, "fetching": True}
    t.drain()
    assert (t.phase("a"), snapshot(t.scheduler)["held_tokens"]) == (Phase.HELD, 96)
    request = t.arrive("a", 10)
    assert t.step() == {request: 115 - 96}
    t.drain()
    assert t.cached("a") == [0, 96]
    assert (t.scheduler.counters["swapped"], t.scheduler.counters["fetched"]) == (2, 1)


@SYNC_AND_ASYNC
def test_a_turn_without_a_fetch_loads_by_itself_and_ranks_as_swapped(tiered: Make, asynchronous: bool) -> None:
    t = tiered(asynchronous)
    t.turn("a", 100, 5)
    t.overwrite()
    t.arrive("a", 10)
    [request] = t.scheduler.waiting
    view = t.scheduler.views.waiting(request)
    assert (view.kv, view.cached_tokens, view.tokens) == (KvPlace.SWAPPED, 96, 115)
    t.drain()
    assert (t.cached("a"), t.scheduler.counters["fetched"]) == ([0, 96], 0)


@SYNC_AND_ASYNC
def test_a_turn_that_comes_while_its_context_is_fetched_waits_and_uses_it(tiered: Make, asynchronous: bool) -> None:
    t = tiered(asynchronous).fetching("a")
    before = t.scheduler.counters["fetched"]
    request = t.arrive("a", 10)
    for _ in range(3):
        assert t.step() == {}
    assert t.phase("a") is Phase.FETCHING
    t.clock.advance(1.0)
    scheduled = [t.step() for _ in range(4)]
    assert {request: 115 - 96} in scheduled
    t.drain()
    assert (t.cached("a"), t.scheduler.counters["fetched"] - before) == ([0, 96], 1)
    assert t.scheduler.stats.holds_ended[ReleaseReason.USED] == 1


def test_a_fetch_is_seen_by_nobody(tiered: Make) -> None:
    t = tiered()
    before = t.scheduler.load_now()
    t.fetching("a")
    view = t.scheduler.load_now()
    assert (view.running, view.waiting, view.running_tokens) == (0, 0, 0)
    assert (view.held_tokens, view.free_tokens) == (96, before.free_tokens - 96)
    assert (t.scheduler.get_num_unfinished_requests(), len(t.scheduler.turns)) == (0, 0)
    t.scheduler.check_integrity()


@pytest.mark.parametrize("end", ["end", "abort", "settle", "reset", "switch", "abort all", "another context"])
@SYNC_AND_ASYNC
def test_whatever_ends_a_fetch_gives_its_memory_back(tiered: Make, end: str, asynchronous: bool) -> None:
    t = tiered(asynchronous).fetching("a")
    expected: Phase | None = Phase.RELEASED
    match end:
        case "end":
            t.control("end", "a")
            expected = None
        case "abort":
            t.scheduler.finish_requests(t.arrive("a", 10), RequestStatus.FINISHED_ABORTED)
        case "settle":
            dispatch(t.scheduler, "settle", {})
        case "reset":  # it is refused
            assert dispatch(t.scheduler, "reset", {})["reset"] is False
            expected = Phase.HELD
        case "switch":
            dispatch(t.scheduler, "set_policy", {"name": "continuum"})
            expected = Phase.HELD  # the switch ends holds; this one has yet to begin
        case "abort all":
            t.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            expected = Phase.SWAPPED
        case "another context":  # the client rewrote its history: nothing of what is loaded will be used
            t.contexts["a"] = [7] * 50
            t.turn("a", 10)
            expected = Phase.SWAPPED
    t.scheduler.check_integrity()
    t.drain()
    assert t.phase("a") is expected
    if expected is Phase.HELD:
        t.clock.advance(FETCHED_HOLD_S)
        t.step()
    assert t.all_free


@SYNC_AND_ASYNC
def test_a_turn_that_is_aborted_while_it_loads_gives_its_memory_back(tiered: Make, asynchronous: bool) -> None:
    t = tiered(asynchronous)
    t.turn("a", 100, 5)
    t.overwrite()
    t.load_s = 1.0
    request = t.arrive("a", 10)
    t.step()
    assert not t.all_free
    t.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
    t.drain()
    assert (t.phase("a"), t.all_free) == (Phase.RELEASED, True)


def test_a_fetched_context_is_held_for_its_turn_but_not_for_ever(tiered: Make) -> None:
    t = tiered().fetching("a")
    t.clock.advance(1.0)
    t.drain()
    for _ in range(3):
        t.step()  # the policy would swap it again at once
    assert t.phase("a") is Phase.HELD
    t.clock.advance(FETCHED_HOLD_S)
    t.step()
    assert (t.phase("a"), t.all_free) == (Phase.RELEASED, True)


def test_a_fetch_takes_free_memory_only_and_the_turn_loads_later(tiered: Make) -> None:
    t = tiered()
    t.turn("a", 500)
    t.overwrite()
    t.arrive("b", 900, 5)
    t.step()
    assert t.control("tool_finished", "a")["fetching"]
    t.step()
    assert (t.phase("a"), t.scheduler.counters["fetch_failed"]) == (Phase.SWAPPED, 1)
    t.turn("a", 10)
    assert t.cached("a") == [0, 31 * BLOCK]


def test_a_fetch_leaves_the_memory_that_waiting_turns_want(tiered: Make) -> None:
    t = tiered()
    t.turn("a", 300)
    t.overwrite()
    t.arrive("b", 900)
    assert t.control("tool_finished", "a")["fetching"]
    assert t.step() == {"b1": 900}
    assert t.phase("a") is Phase.SWAPPED


def test_a_fetch_leaves_to_a_turn_that_loads_only_what_it_does_not_own_yet(tiered: Make) -> None:
    """Of 63 blocks the turn owns 31, and lacks one more. The fetch needs 18."""
    t = tiered()
    t.turn("a", 300)
    t.turn("b", 500)
    t.overwrite()
    t.load_s = 1.0
    loading = t.scheduler.requests[t.arrive("b", 10)]
    t.step()
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert t.control("tool_finished", "a")["fetching"]
    t.step()
    assert (t.phase("a"), t.scheduler.counters["fetch_failed"]) == (Phase.FETCHING, 0)


def test_a_fetch_leaves_to_a_turn_with_held_blocks_only_what_it_lacks(tiered: Make) -> None:
    """The turn waits for a place in the batch. Of 63 blocks 25 are used and 19 held, and the fetch needs 6."""
    t = tiered()
    t.turn("a", 100)
    t.overwrite()
    t.scheduler.policies = replace(t.scheduler.policies, pause=AlwaysSwap(hold_first=True, review_steps=None))
    t.turn("b", 300)
    assert t.phase("b") is Phase.HELD
    t.arrive("c", 390, 5)
    t.step()
    for name in ("max_num_running_reqs", "max_num_active_reqs"):  # the latter in newer versions of vLLM
        if hasattr(t.scheduler, name):
            setattr(t.scheduler, name, 1)
    t.arrive("b", 10)
    assert t.control("tool_finished", "a")["fetching"]
    t.load_s = 1.0
    t.step()
    assert (t.phase("b"), t.phase("a"), t.scheduler.counters["fetch_failed"]) == (Phase.RESUMING, Phase.FETCHING, 0)


def test_what_the_device_still_has_is_held_without_a_load(tiered: Make) -> None:
    t = tiered()
    t.turn("a", 100, 5)
    t.load_s = 1000.0
    t.control("tool_finished", "a")
    t.step()
    assert (t.phase("a"), snapshot(t.scheduler)["held_tokens"]) == (Phase.HELD, 96)


def test_a_hold_is_swapped_at_a_review(tiered: Make) -> None:
    t = tiered(hold_first=True)
    t.arrive("a", 100, 5)
    while t.phase("a") is not Phase.HELD:
        t.step()
    t.drain()
    t.step()
    assert (t.phase("a"), t.all_free, t.scheduler.stats.holds_ended[ReleaseReason.SWAPPED]) == (Phase.SWAPPED, True, 1)
    t.overwrite()
    t.control("tool_finished", "a")
    t.drain()
    assert t.phase("a") is Phase.HELD


def test_what_exceeds_a_programs_share_is_released_and_counted(tiered: Make) -> None:
    t = tiered(host_blocks=100)
    t.turn("a", 26 * BLOCK)
    assert (t.phase("a"), t.scheduler.counters["swap_refused"]) == (Phase.RELEASED, 1)
    # What the host took of it is of use all the same.
    t.overwrite()
    t.turn("a", 10)
    assert t.cached("a") == [0, 25 * BLOCK]


def test_the_copy_of_a_preempted_turn_counts_as_the_only_one_until_it_runs_again(tiered: Make) -> None:
    t = tiered()
    turn = t.arrive("a", 400, output=50, last=True)
    for _ in range(10):
        t.step()
    cache = t.scheduler.swapping.cache
    assert cache is not None
    account = cache.chunks.accounts["default/a"]
    assert (account.standing.resident, account.standing.saved_s) == (True, 0.0), "no later turn will need it"
    t.clock.advance(5.0)
    t.scheduler.preempt({turn})
    assert (account.standing.resident, account.standing.since_s) == (False, 5.0)
    assert account.standing.saved_s > 0
    t.clock.advance(2.0)
    t.scheduler.views.load = t.scheduler.load_now()
    view = t.scheduler.views.waiting(t.scheduler.requests[turn])
    assert (view.kv, view.cached_tokens, view.waited_s) == (KvPlace.SWAPPED, 25 * BLOCK, 2.0)
    t.step()
    assert account.standing.resident
    t.drain()


def test_a_program_that_ended_leaves_the_host_to_others(tiered: Make) -> None:
    t = tiered(host_blocks=60)
    for name in "abcdefgh":
        t.turn(name, 15 * BLOCK + 1)
        t.control("end", name)
    t.turn("z", 15 * BLOCK + 1)
    assert (t.phase("z"), t.scheduler.swapping.used_tokens) == (Phase.SWAPPED, 60 * BLOCK)


def test_a_notification_that_comes_after_the_next_turn_or_the_end_is_counted_and_no_fault(tiered: Make) -> None:
    t = tiered()
    t.turn("a", 100)
    t.arrive("a", 10, 20)
    assert t.control("tool_finished", "a") == {"paused": False}, "its next turn waits"
    t.step()
    assert t.control("tool_finished", "a") == {"paused": False}, "its next turn runs"
    t.drain()
    t.control("end", "a")
    began = {"key": "default/a", "tools": ["ls"]}
    assert dispatch(t.scheduler, "tool_started", began) == {"paused": False}, "it has ended"
    assert t.scheduler.counters["late_tool_notification"] == 3
    assert "refused" in dispatch(t.scheduler, "tool_finished", {"key": "default/a", "after_s": 1.0}), "a fault"


def test_a_tool_that_finished_after_a_reset_finds_nothing_to_fetch(tiered: Make) -> None:
    t = tiered()
    t.turn("a", 100)
    assert dispatch(t.scheduler, "reset", {}) == {"reset": True}
    assert dispatch(t.scheduler, "reset", {}) == {"reset": True}
    assert t.phase("a") is Phase.RELEASED
    assert t.control("tool_finished", "a") == {"held": False, "fetching": False}


def test_a_copy_that_others_displaced_is_lost_and_counted(tiered: Make) -> None:
    t = tiered()
    t.turn("a", 100)
    t.overwrite()
    t.scheduler.connector.reset_cache()  # as if others had taken its room
    t.control("tool_finished", "a")
    t.drain()
    assert (t.phase("a"), t.scheduler.counters["fetch_lost"]) == (Phase.RELEASED, 1)


@pytest.mark.parametrize("seed", range(6))
@SYNC_AND_ASYNC
def test_whatever_happens_nothing_leaks(tiered: Make, seed: int, asynchronous: bool) -> None:
    t, rng, alive = tiered(asynchronous, host_blocks=120, hold_first=seed % 2 == 1), random.Random(seed), []
    for _ in range(400):
        t.load_s = rng.choice([0.0, 0.05, 0.3])
        name = rng.choice("abcdefgh")
        match rng.randrange(12):
            case 0 | 1 | 2 if len(t.contexts.get(name, [])) < 300:
                alive.append(t.arrive(name, rng.randrange(1, 120), rng.randrange(1, 30), last=rng.random() < 0.1))
            case 3 | 4:
                t.control("tool_finished", name)
            case 5 if alive:
                t.scheduler.finish_requests(alive.pop(rng.randrange(len(alive))), RequestStatus.FINISHED_ABORTED)
            case 6 if rng.random() < 0.3:
                t.control("end", name)
            case 7 if rng.random() < 0.1:
                dispatch(t.scheduler, "reset", {})
        t.clock.advance(rng.choice([0.0, 0.01, 0.1]))
        t.step()
        t.scheduler.check_integrity()
    assert t.scheduler.counters["swapped"] > 10
    assert t.scheduler.counters["fetched"] + t.scheduler.counters["fetch_failed"] > 0


@SYNC_AND_ASYNC
def test_output_that_is_computed_early_is_stored_with_the_program(tiered: Make, asynchronous: bool) -> None:
    """The host tier gets the blocks of early prefill as the program's, and stores none without KV."""
    t = tiered(asynchronous, hold_first=True)
    t.scheduler.policies = replace(t.scheduler.policies, pause=AlwaysSwap(hold_first=True, review_steps=None))
    t.turn("a", 100, 5)
    output = pack_ids(range(3000, 3100))
    answer = dispatch(t.scheduler, "extend", {"key": "default/a", "at": 105, "ids": output})
    assert answer == {"ended": None}
    t.drain()
    assert snapshot(t.scheduler)["held_tokens"] == 192
    assert t.scheduler.swapping.tokens_of("default/a") == 192
    t.overwrite()  # evicts the hold
    assert t.phase("a") is Phase.RELEASED
    t.contexts["a"] = [*t.contexts["a"], *range(3000, 3110)]
    t.turn("a", 0)
    assert t.cached("a") == [0, 192]
