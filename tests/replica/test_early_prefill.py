"""Timelines of early prefill: a tool's output is computed into the held context while the tool runs.

A replica has 63 usable blocks of 16 tokens. A program "a" has paused with 100 prompt tokens and 5 generated ones, of
which the last has no KV: 104 tokens are held, 96 of them in full blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.lifecycle.machine import Phase
from cluster.core.turn import pack_ids
from replicas.control import dispatch, snapshot
from replicas.early_prefill import LEAST_TOKENS, MAX_REWRITES, EndReason, added_s, spare_tokens
from replicas.policy import LoadView, ReplicaFacts
from replicas.scheduler import AgentScheduler
from tests.replica.test_timelines import BLOCK, SYNC_AND_ASYNC, Programs

Replica = Callable[..., Any]
OUTPUT = [3000 + number % 11 for number in range(400)]
"""Tokens of a tool's output."""


class Paused(Programs):
    """Programs whose tools report their output while they run."""

    def output(self, program: str, tokens: int, at: int | None = None, ids: list[int] | None = None) -> str | None:
        """The tool has written so many tokens so far. The answer's reason why they are not computed."""
        known = self.contexts[program]
        position = len(known) if at is None else at
        payload = {"key": f"default/{program}", "at": position, "ids": pack_ids((ids or OUTPUT)[:tokens])}
        answer = dispatch(self.scheduler, "extend", payload)
        assert "refused" not in answer, answer
        reason: str | None = answer["ended"]
        return reason

    def returns(self, program: str, tokens: int, ids: list[int] | None = None) -> Request:
        """The tool has ended after so many tokens, and the next turn arrives."""
        self.contexts[program].extend((ids or OUTPUT)[:tokens])
        self.arrive(program, 0)
        [request] = [one for one in self.scheduler.requests.values() if one.request_id in self.scheduler.turns]
        return request

    def steps(self, most: int = 50) -> list[dict[str, int]]:
        """Steps until the engine would sleep; tokens scheduled for each request, early prefill as "early"."""
        done = []
        while self.scheduler.has_requests() and len(done) < most:
            scheduled = self.engine.step().num_scheduled_tokens
            done.append({"early" if name.startswith("caesura-early") else name: n for name, n in scheduled.items()})
        return [step for step in done if step]

    def held_tokens(self, program: str) -> int:
        held = self.scheduler.holds.get(f"default/{program}")
        return held.tokens if held else 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that were computed early and used, and wasted."""
        self.scheduler.check_integrity()
        numbers = snapshot(self.scheduler)["early_prefill_tokens"]
        return numbers["used"], numbers["wasted"]


Make = Callable[..., Paused]


@pytest.fixture
def paused(replica: Replica) -> Make:
    def make(*args: Any, asynchronous: bool = False, **kwargs: Any) -> Paused:
        p = Paused(replica("continuum", asynchronous, *args, default_ttl_s=1000.0, **kwargs))
        p.turn("a", new_tokens=100, output=5)
        assert (p.phase("a"), p.held_tokens("a")) == (Phase.HELD, 104)
        return p

    return make


@SYNC_AND_ASYNC
def test_output_is_computed_while_the_tool_runs_and_the_next_turn_computes_the_rest(
    paused: Make, asynchronous: bool
) -> None:
    p = paused(asynchronous=asynchronous)
    assert p.output("a", 100) is None
    # 105 + 100 tokens are known: 12 full blocks, of which 6 are held.
    assert sum(step["early"] for step in p.steps()) == 12 * BLOCK - 6 * BLOCK
    assert (p.phase("a"), p.held_tokens("a")) == (Phase.HELD, 12 * BLOCK)
    request = p.returns("a", 120)
    assert request.num_tokens == 225
    assert p.step() == {request.request_id: 225 - 12 * BLOCK}
    p.engine.run()
    assert p.tokens == (6 * BLOCK, 0)


@SYNC_AND_ASYNC
def test_later_output_extends_what_was_computed(paused: Make, asynchronous: bool) -> None:
    p = paused(asynchronous=asynchronous)
    p.output("a", 60)
    first = sum(step["early"] for step in p.steps())
    p.output("a", 200)  # sent again from the beginning: nothing is computed twice
    second = sum(step["early"] for step in p.steps())
    p.output("a", 40, at=305, ids=OUTPUT[200:])  # only what is new
    third = sum(step["early"] for step in p.steps())
    assert (first, second, third) == (64, 144, 32)
    assert p.held_tokens("a") == 345 // BLOCK * BLOCK == 96 + 64 + 144 + 32
    p.returns("a", 240)
    p.engine.run()
    assert p.tokens == (240, 0)


def test_the_engine_steps_for_it_and_then_sleeps(paused: Make) -> None:
    p = paused()
    p.steps()
    assert not p.scheduler.has_requests()
    p.output("a", 5)  # no new full block
    assert not p.scheduler.has_requests()
    p.output("a", 100)
    assert p.scheduler.has_requests()
    p.steps()
    assert not p.scheduler.has_requests()


def test_nobody_sees_its_request(paused: Make) -> None:
    p = paused()
    p.output("a", 100)
    p.engine.step()
    view = p.scheduler.load_now()
    assert (view.running, view.waiting, len(p.scheduler.turns), len(p.scheduler.requests)) == (0, 0, 0, 0)
    assert view.held_tokens == p.held_tokens("a")
    p.scheduler.check_integrity()


def test_nothing_is_computed_beside_a_prompt(paused: Make) -> None:
    p = paused(max_num_batched_tokens=256)
    p.arrive("b", 600, output=3)
    p.output("a", 200)
    steps = p.steps()
    assert steps[:3] == [{"b1": 256}, {"b1": 256}, {"b1": 88}]
    assert sum(step.get("early", 0) for step in steps[3:]) == 305 // BLOCK * BLOCK - 96


def test_beside_turns_that_generate_it_takes_a_bounded_share_of_the_time(paused: Make) -> None:
    p = paused()
    # A step takes 10 ms, with 10 tokens at most, and every further token 1 ms: a block adds 7 ms, as 35 steps allow.
    cost = replace(p.scheduler.facts.cost, overhead_s=0, weights_s=0.01, token_s=0.001, context_s=0, pair_s=0)
    p.scheduler.facts = replace(p.scheduler.facts, cost=cost)
    p.arrive("b", 30, output=400)
    p.step()
    p.output("a", 100)
    added = total = 0.0
    for _ in range(300):
        load = p.scheduler.load_now()
        step_s, computed = cost.decode_step_s(load.running, load.running_tokens), p.held_tokens("a")
        early = sum(n for name, n in p.step().items() if name.startswith("caesura-early"))
        total += step_s
        added += added_s(load, computed, early) if early else 0.0
        assert added <= 0.02 * total + 0.010
    assert p.held_tokens("a") == 205 // BLOCK * BLOCK  # it has come to its end


@SYNC_AND_ASYNC
def test_another_final_output_wastes_only_what_differs(paused: Make, asynchronous: bool) -> None:
    p = paused(asynchronous=asynchronous)
    p.output("a", 200)
    p.steps()
    final = [*OUTPUT[:80], 7, 7, 7]
    request = p.returns("a", 83, final)
    # 105 + 80 tokens are the same: 11 full blocks.
    assert p.step() == {request.request_id: 188 - 11 * BLOCK}
    p.engine.run()
    used = 11 * BLOCK - 6 * BLOCK
    assert p.tokens == (used, 305 // BLOCK * BLOCK - 96 - used)


def test_a_message_that_comes_after_a_later_one_changes_nothing(paused: Make) -> None:
    p = paused()
    p.output("a", 200)
    p.steps()
    assert [p.output("a", tokens) for tokens in (150, 0, 199)] == [None] * 3
    assert (p.steps(), p.held_tokens("a")) == ([], 305 // BLOCK * BLOCK)
    p.returns("a", 200)
    assert p.output("a", 10) == "not_held"  # the next turn has come
    p.engine.run()
    assert p.tokens == (305 // BLOCK * BLOCK - 96, 0)


def test_a_tool_that_rewrites_its_output_is_not_followed_for_long(paused: Make) -> None:
    p = paused()
    reasons = []
    for number in range(MAX_REWRITES + 2):
        progress = [2000 + number] * 64  # a progress bar
        reasons.append(p.output("a", 64, ids=progress))
        p.steps()
    assert reasons == [None] * (MAX_REWRITES + 1) + ["rewritten"]
    assert p.scheduler.early_prefill.ends[EndReason.REWRITTEN] == 1
    assert p.output("a", 100) == "rewritten"
    p.returns("a", 100)
    p.engine.run()
    used, wasted = p.tokens
    assert used == 0 and wasted == 2 * 64


@pytest.mark.parametrize("end", ["expiry", "release", "end", "abort", "switch", "moved"])
@SYNC_AND_ASYNC
def test_whatever_ends_the_hold_frees_and_counts_it(paused: Make, end: str, asynchronous: bool) -> None:
    p = paused(asynchronous=asynchronous)
    p.output("a", 200)
    p.engine.step()
    work = p.held_tokens("a") - 96
    assert work > 0
    match end:
        case "expiry":
            p.clock.advance(2000.0)
        case "abort":
            p.scheduler.finish_requests(p.returns("a", 300).request_id, RequestStatus.FINISHED_ABORTED)
        case "switch":
            dispatch(p.scheduler, "set_policy", {"name": "vllm"})
        case _:
            dispatch(p.scheduler, end, {"key": "default/a"})
    p.engine.step()
    assert not p.scheduler.early_prefill.ready
    assert p.output("a", 300) == "not_held" if p.scheduler.programs.get("default/a") else True
    assert sum(p.tokens) == work


def test_output_of_a_program_that_is_not_held_is_refused_by_name(paused: Make) -> None:
    p = paused()
    dispatch(p.scheduler, "release", {"key": "default/a"})
    assert p.output("a", 100) == "not_held"
    assert snapshot(p.scheduler)["early_prefill_ends"]["not_held"] == 1
    p.turn("b", 20, last=True)
    assert dispatch(p.scheduler, "extend", {"key": "default/b", "at": 0, "ids": b""}) == {"ended": "not_held"}


def test_bad_positions_and_ids_are_refused(paused: Make) -> None:
    p = paused()
    for at, ids, part in [(106, b"", "at must be"), (-1, b"", "at must be"), (105, b"abc", "bytes")]:
        answer = dispatch(p.scheduler, "extend", {"key": "default/a", "at": at, "ids": ids})
        assert part in answer["refused"], answer
    assert not p.scheduler.early_prefill.ready


def test_a_prompt_that_does_not_begin_with_the_held_context_is_not_computed(paused: Make) -> None:
    p = paused()
    assert p.output("a", 100, at=50) == "rewritten"
    assert p.steps() == []
    p.returns("a", 20)
    p.engine.run()
    assert p.tokens == (0, 0)


@SYNC_AND_ASYNC
def test_a_prompt_that_rewrites_the_context_is_computed_in_the_pause(paused: Make, asynchronous: bool) -> None:
    """The next prompt has the first 70 tokens of the context, and 130 others. So 4 blocks of the hold stay, and 8 are
    computed: when the next turn comes, 12 blocks of its prompt have KV, where it would have found 4.
    """
    p = paused(asynchronous=asynchronous)
    rewritten = [*p.contexts["a"][:70], *OUTPUT[:130]]
    payload = {"key": "default/a", "at": 0, "ids": pack_ids(rewritten), "rewrites": True}
    assert dispatch(p.scheduler, "extend", payload) == {"ended": None}
    assert p.held_tokens("a") == 104, "nothing is given up before it is replaced"
    assert sum(step["early"] for step in p.steps()) == 8 * BLOCK
    assert p.held_tokens("a") == 12 * BLOCK
    assert snapshot(p.scheduler)["early_prefill_rewritten"] == 1
    p.contexts["a"] = list(rewritten)
    request = p.returns("a", 30, ids=OUTPUT[200:])
    assert p.step() == {request.request_id: 230 - 12 * BLOCK}
    p.engine.run()
    assert p.tokens == (8 * BLOCK, 0)


def test_a_client_that_sends_the_context_after_all_has_only_caused_waste(paused: Make) -> None:
    """What was expected is freed. The context's own blocks were given back, but the prefix cache still has them."""
    p = paused()
    context = list(p.contexts["a"])
    rewritten = [*context[:70], *OUTPUT[:130]]
    dispatch(p.scheduler, "extend", {"key": "default/a", "at": 0, "ids": pack_ids(rewritten), "rewrites": True})
    p.steps()
    request = p.returns("a", 30)
    assert request.num_tokens == 135
    assert p.step() == {request.request_id: 135 - 6 * BLOCK}
    p.engine.run()
    assert p.tokens == (0, 8 * BLOCK)


def test_a_prompt_without_room_for_an_answer_is_not_computed(paused: Make) -> None:
    p = paused()
    limit = p.scheduler.max_model_len
    assert p.output("a", limit, ids=[1] * limit) == "too_long"
    assert p.steps() == []


def test_it_uses_free_memory_only(paused: Make) -> None:
    p = paused()
    p.output("a", 400)
    p.arrive("b", 50 * BLOCK, output=3)  # 7 of 63 blocks are held, 50 needed
    p.steps()
    assert p.held() >= {"a"}
    assert p.held_tokens("a") <= 104 + 6 * BLOCK
    assert p.scheduler.early_prefill.ends[EndReason.NO_MEMORY] == 1  # the engine does not step for it for ever


def test_an_extended_hold_still_yields_to_a_running_turn(paused: Make) -> None:
    p = paused()
    p.output("a", 400)
    p.steps()
    p.turn("b", 55 * BLOCK, output=3, last=True)
    assert p.held() == set()
    assert p.tokens[1] == 505 // BLOCK * BLOCK - 96


def test_a_hold_of_which_the_end_is_evicted_is_not_extended_again(paused: Make) -> None:
    p = paused()
    p.output("a", 200)
    p.steps()
    p.scheduler.lifecycle.trim("default/a", 8, ReleaseReason.BROKEN_RUNNING)
    p.scheduler.check_integrity()
    assert p.output("a", 300) == "no_memory"
    p.returns("a", 200)
    p.engine.run()
    assert p.tokens == (2 * BLOCK, 305 // BLOCK * BLOCK - 8 * BLOCK)


def test_the_policy_sees_the_longer_hold(paused: Make) -> None:
    p = paused()
    p.output("a", 200)
    p.steps()
    [held] = p.scheduler.holds
    assert p.scheduler.views.hold(held).context_tokens == 305 // BLOCK * BLOCK
    request = p.returns("a", 210)
    assert p.scheduler.views.missing_tokens(request) == 315 - 305 // BLOCK * BLOCK


def test_tenants_do_not_share_what_was_computed(paused: Make) -> None:
    """The hashes have the turn's own salt, so that its own next turn finds the blocks, and nobody else's."""
    p = paused()
    request = p.scheduler.early_prefill._paused["default/a"]
    request.cache_salt = "tenant"
    p.output("a", 100)
    made: list[Request] = []
    calls = p.scheduler.early_prefill._calls

    def add(one: Request) -> None:
        made.append(one)
        calls.add(one)

    p.scheduler.early_prefill._calls = replace(calls, add=add)
    p.steps()
    assert {one.cache_salt for one in made} == {"tenant"}


# --- a drafter --------------------------------------------------------------------------------------------------------


class Drafting(AgentScheduler):
    """As with a drafter that reads the model's hidden states: vLLM computes the last block of each prefix hit again."""

    @property
    def use_eagle(self) -> bool:
        return True

    @use_eagle.setter
    def use_eagle(self, value: bool) -> None:
        """vLLM sets what its configuration has."""

    use_eagle_block_drop = use_eagle
    """Newer versions of vLLM give this to the KV cache: there are such drafters without it."""


@SYNC_AND_ASYNC
def test_with_a_drafter_nothing_is_computed_early(paused: Make, asynchronous: bool) -> None:
    p = paused(asynchronous=asynchronous, scheduler_cls=Drafting)
    assert p.output("a", 100) == "not_held"
    assert p.steps() == []
    request = p.returns("a", 100)
    assert p.step() == {request.request_id: 205 - 5 * BLOCK}
    p.engine.run()
    assert p.tokens == (0, 0)


@SYNC_AND_ASYNC
def test_where_less_than_the_hold_is_reused_it_ends(paused: Make, asynchronous: bool) -> None:
    """The engine does not step for it for ever, and what was computed of the prompt before stays."""
    p = paused(asynchronous=asynchronous, scheduler_cls=Drafting)
    p.scheduler.early_prefill.enabled = True
    p.turn("b", new_tokens=100, output=5)
    p.output("b", 100)
    early = sum(step["early"] for step in p.steps())
    assert not p.scheduler.has_requests()
    assert p.scheduler.early_prefill.ends[EndReason.NOT_REUSED] == 1
    assert p.output("b", 300) == "not_reused"
    gained = p.held_tokens("b") - 6 * BLOCK
    assert 0 <= gained < early, "each part has computed the last block of the part before again"
    p.returns("b", 120)
    p.engine.run()
    assert p.tokens == (gained, early - gained)


# --- room -------------------------------------------------------------------------------------------------------------


def _load(p: Paused, **values: Any) -> LoadView:
    facts: ReplicaFacts = p.scheduler.facts
    known: dict[str, Any] = {
        "facts": facts, "now_s": 0.0, "step": 0, "running": 0, "running_tokens": 0, "waiting": 0, "held_tokens": 0,
        "free_tokens": 100_000,
    }  # fmt: skip
    return LoadView(**(known | values))


def test_room_grows_with_credit_and_ends_with_memory(paused: Make) -> None:
    p = paused()
    idle = spare_tokens(_load(p), 1000, 10_000, 0.0, BLOCK)
    assert idle % BLOCK == 0 and added_s(_load(p), 1000, idle) <= 0.010 < added_s(_load(p), 1000, idle + BLOCK)
    busy = _load(p, running=8, running_tokens=8000)
    rooms = [spare_tokens(busy, 1000, 10_000, credit_s, BLOCK) for credit_s in (0.0, 0.001, 0.002, 0.004)]
    assert rooms[0] == 0 and rooms == sorted(rooms) and rooms[-1] > 0
    assert all(room == 0 or room >= LEAST_TOKENS for room in rooms)
    assert spare_tokens(_load(p, free_tokens=3 * BLOCK), 1000, 10_000, 0.0, BLOCK) == 2 * BLOCK
    assert spare_tokens(_load(p, free_tokens=BLOCK), 1000, 10_000, 0.0, BLOCK) == 0
    assert spare_tokens(_load(p), 1000, 2 * BLOCK, 0.0, BLOCK) == 2 * BLOCK
    assert spare_tokens(_load(p, waiting=1), 1000, 10_000, 1.0, BLOCK) == 0
