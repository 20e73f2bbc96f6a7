"""SGLang's published rule on vLLM's engine, as timelines. Figures come from SGLang 0.5.23's constants by hand.

A page has 16 tokens. A request needs its tokens that are not cached, what it may generate and a page, and this must be
less than what is free.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from replicas.peers.sglang import SglangParameters
from replicas.peers.sglang_scheduler import NewTokenRatio, PrefillBudget, SglangScheduler
from replicas.virtual_engine import Shape, VirtualEngine

BLOCK = 16
CONTEXT = 8192


class Sglang:
    """One engine with SGLang's rule."""

    def __init__(self, model: Path, policy: str = "fcfs", *, known_lengths: bool = True, **shape: int) -> None:
        parameters = SglangParameters.model_validate({"policy": policy, "known_lengths": known_lengths})
        peer = parameters.build(None)  # type: ignore[arg-type]
        self.engine = VirtualEngine(
            peer.scheduler_cls, model, Shape(**shape), additional_config=peer.additional_config(CONTEXT)
        )
        assert isinstance(self.engine.scheduler, SglangScheduler)
        self.scheduler: SglangScheduler = self.engine.scheduler
        self.requests: dict[str, Request] = {}

    def arrive(self, name: str, prompt: int | list[int], output: int = 1) -> None:
        tokens = [1000 + 10 * ord(name[0]) + i % 7 for i in range(prompt)] if isinstance(prompt, int) else prompt
        self.requests[name] = self.engine.submit(name, tokens, output)

    def step(self) -> dict[str, int]:
        return dict(self.engine.step().num_scheduled_tokens)

    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]


@pytest.fixture
def sglang(tiny_config: Path) -> Any:
    made: list[Sglang] = []

    def make(*args: Any, **kwargs: Any) -> Sglang:
        made.append(Sglang(tiny_config, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.engine.run()
        assert one.scheduler.reset_prefix_cache()
        assert one.engine.free_blocks() == one.engine.shape.num_blocks - 1, "a block leaked"
        assert all(request.is_finished() for request in one.requests.values())


def test_a_prefill_step_has_no_decodes(sglang: Any) -> None:
    s = sglang()
    s.arrive("a", 20, 4)
    assert s.step() == {"a": 20}
    assert s.step() == {"a": 1}
    s.arrive("b", 30, 2)
    assert s.step() == {"b": 30}
    assert s.step() == {"a": 1, "b": 1}


def test_a_long_prompt_is_completed_before_anything_is_generated(sglang: Any) -> None:
    s = sglang(max_num_batched_tokens=256, max_num_seqs=8)
    s.arrive("a", 20, 9)
    s.step()
    s.arrive("b", 600, 2)
    s.arrive("c", 20, 2)
    assert [s.step() for _ in range(3)] == [{"b": 256}, {"b": 256}, {"b": 88, "c": 20}]
    assert s.step() == {"a": 1, "b": 1, "c": 1}


def test_nobody_joins_a_long_prompt_while_admissions_are_off(sglang: Any) -> None:
    s = sglang(max_num_batched_tokens=256, max_num_seqs=8)
    s.arrive("a", 20, 9)
    s.step()
    s.arrive("b", 300, 2)
    assert s.step() == {"b": 256}
    s.scheduler._full = True
    s.arrive("c", 20, 2)
    assert [s.step() for _ in range(2)] == [{"b": 44}, {"a": 1, "b": 1}]
    assert s.step() == {"c": 20}, "b has left"


def test_a_request_waits_for_the_memory_that_it_and_the_running_ones_may_need(sglang: Any) -> None:
    """1008 tokens. a took 112 of them and may generate 500 - 1 more, of which 0.7 are reserved: 546.7 are left.

    b needs 300 + 231 + 16 = 547 of them, and c 1 token less, but nobody overtakes.
    """
    s = sglang()
    s.arrive("a", 100, 500)
    s.step()
    s.arrive("b", 300, 231)
    s.arrive("c", 300, 230)
    assert s.step() == {"a": 1}
    assert s.scheduler.ratio.current == pytest.approx(0.7 - 0.7 * 0.86 / 600)
    assert s.waiting() == ["b", "c"]
    assert s.step() == {"a": 1}, "b would fit now, but admissions are off until a request leaves"
    s = sglang()
    s.arrive("a", 100, 500)
    s.step()
    s.arrive("c", 300, 230)
    assert s.step() == {"c": 300}


def test_admissions_go_on_when_a_request_has_left(sglang: Any) -> None:
    s = sglang()
    s.arrive("a", 100, 9)
    s.arrive("b", 500, 3)
    s.step()
    s.arrive("c", 500, 3)
    assert [set(s.step()) for _ in range(3)] == [{"a", "b"}, {"a", "b"}, {"c"}]


def test_without_a_limit_the_context_counts_up_to_4096_tokens(sglang: Any) -> None:
    """The context is bounded by the memory, 8000 tokens, and by a page."""
    s = sglang(known_lengths=False, num_blocks=501)
    s.arrive("a", 100, 3)
    s.arrive("b", 7000, 3)
    limits = [s.scheduler._limit_tokens(s.requests[name]) for name in "ab"]
    assert limits == [8000 - 16 - 100 - 1, 8000 - 16 - 7000 - 1]
    assert [s.scheduler._output_tokens(s.requests[name]) for name in "ab"] == [4096, 983]


def test_what_is_admitted_in_a_step_counts_for_the_next_one(sglang: Any) -> None:
    """1008 tokens: a takes 112 + 16 and 400 to come, so that 480 are left; b needs 200 + 264 + 16 of them."""
    s = sglang()
    s.arrive("a", 100, 400)
    s.arrive("b", 200, 264)
    assert set(s.step()) == {"a"}
    s = sglang()
    s.arrive("a", 100, 400)
    s.arrive("b", 200, 263)
    assert set(s.step()) == {"a", "b"}


@pytest.mark.parametrize(("output", "ran"), [(400, {"x": 1}), (300, {"b": 20})])
def test_a_cached_prefix_is_not_needed_twice_but_cannot_be_evicted_either(
    sglang: Any, output: int, ran: dict[str, int]
) -> None:
    """b has 480 of a's tokens. Of 1008, x has 112 and a reserve of 0.7 for each of 39 to come: 868.7 are left.

    b needs 20 + 400 + 16, but without the 480 only 388.7 are left. They are enough for 20 + 300 + 16.
    """
    s = sglang()
    tokens = [2000 + i % 7 for i in range(500)]
    s.arrive("a", tokens[:490])
    s.engine.run()
    s.arrive("x", 100, 40)
    assert s.step() == {"x": 100}
    s.arrive("b", tokens, output)
    cached, blocks = s.scheduler._cached(s.requests["b"])
    assert (cached, len(blocks)) == (480, 30)
    assert s.step() == ran


def test_a_chunk_takes_whole_pages_and_reserves_output_only_with_the_last() -> None:
    last, first = PrefillBudget(1000, 256, BLOCK), PrefillBudget(1000, 256, BLOCK)
    last.take(100, output_tokens=50)
    assert (last.step_tokens, last.free_tokens) == (256 - 112, 1000 - 112 - 16 - 50)
    first.take(300, output_tokens=50)
    assert (first.step_tokens, first.free_tokens) == (0, 1000 - 256 - 16)


# --- the ratio --------------------------------------------------------------------------------------------------------


def test_the_ratio_falls_in_600_decode_steps_and_begins_again() -> None:
    ratio = NewTokenRatio()
    for _ in range(300):
        ratio.decay()
    assert ratio.current == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(400):
        ratio.decay()
    assert ratio.current == pytest.approx(0.098)
    ratio.retracted(generated_tokens=30, limit_tokens=199, requests=3)
    assert ratio.current == pytest.approx((30 + 20 * 3) / 200)
    ratio.retracted(generated_tokens=300, limit_tokens=199, requests=3)
    assert ratio.current == 1.0
    ratio.reset()
    assert ratio.current == 0.7


def test_an_idle_replica_begins_with_the_first_ratio(sglang: Any) -> None:
    s = sglang()
    s.arrive("a", 20, 50)
    s.engine.run()
    assert s.scheduler.ratio.current == pytest.approx(0.7 - 49 * 0.602 / 600)
    s.arrive("b", 20, 2)
    assert s.scheduler.ratio.current == 0.7


# --- retraction -------------------------------------------------------------------------------------------------------


def test_the_fewest_generated_tokens_and_then_the_longest_prompt_are_retracted(sglang: Any) -> None:
    """13 blocks. When b, c and d have 17 tokens and a has 20, the next token of a needs a 14th block.

    Of the three with 17 tokens, c has the longest prompt. It goes behind e, which has waited.
    """
    s = sglang(num_blocks=14)
    s.scheduler.ratio = NewTokenRatio(initial=0.0, least=0.0)
    s.arrive("a", 29, 100)
    assert [s.step() for _ in range(4)] == [{"a": 29}, {"a": 1}, {"a": 1}, {"a": 1}]
    for name, prompt, output in (("b", 31, 100), ("c", 45, 60), ("d", 28, 50)):
        s.arrive(name, prompt, output)
        assert s.step() == {name: prompt}
    s.arrive("e", 90)
    assert [set(s.step()) for _ in range(16)] == [set("abcd")] * 16
    assert [len(s.requests[name].output_token_ids) for name in "abcd"] == [20, 17, 17, 17]
    assert s.step() == {"a": 1, "b": 1, "d": 1}
    assert s.waiting() == ["e", "c"]
    assert s.scheduler.ratio.current == pytest.approx((20 + 17 + 17 + 3 * 20) / (100 + 100 + 50 + 1))


# --- longest prefix match ---------------------------------------------------------------------------------------------


def heads(name: str, tokens: int) -> list[int]:
    return [3000 + 50 * ord(name) + i % 11 for i in range(tokens)]


def cached(s: Sglang, *prompts: list[int]) -> None:
    for number, prompt in enumerate(prompts):
        s.arrive(f"warm{number}", prompt)
    s.engine.run()


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c"]), ("lpm", ["c", "b", "a"])])
def test_the_longest_cached_prefix_goes_first(sglang: Any, policy: str, order: list[str]) -> None:
    s = sglang(policy, max_num_seqs=1)
    cached(s, heads("b", 64), heads("c", 96))
    s.arrive("a", heads("a", 100))
    s.arrive("b", heads("b", 100))
    s.arrive("c", heads("c", 100))
    assert [next(iter(s.step())) for _ in range(3)] == order


@pytest.mark.parametrize(("waiting", "first"), [(128, "z"), (129, "a0")])
def test_beyond_128_waiting_requests_it_is_by_arrival(sglang: Any, waiting: int, first: str) -> None:
    s = sglang("lpm", max_num_seqs=1, num_blocks=200)
    cached(s, heads("z", 64))
    for number in range(waiting - 1):
        s.arrive(f"a{number}", [10 * number + i % 3 for i in range(20)])
    s.arrive("z", heads("z", 100))
    assert set(s.step()) == {first}


def test_of_requests_with_the_same_uncached_prefix_one_goes_first(sglang: Any) -> None:
    """a and b begin with the same 32 tokens, of which nothing is cached; c with others. Then b finds a's KV."""
    s = sglang("lpm", max_num_seqs=1)
    s.arrive("a", heads("a", 64))
    s.arrive("b", [*heads("a", 48), *heads("b", 32)])
    s.arrive("c", heads("c", 64))
    assert [s.step() for _ in range(3)] == [{"a": 64}, {"b": 32}, {"c": 64}], (
        "once a is cached, b has the longest match"
    )
    s = sglang("lpm", max_num_seqs=2, max_num_batched_tokens=64)
    s.arrive("a", heads("a", 64), 3)
    s.arrive("b", [*heads("a", 48), *heads("b", 32)])
    s.arrive("c", heads("c", 48), 3)
    s.arrive("d", [*heads("c", 16), *heads("d", 48)], 3)
    s.scheduler._sort_waiting()
    assert s.waiting() == ["a", "c", "d", "b"], "d shares 16 tokens only"


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_what_waiting_requests_find_is_evicted_last(sglang: Any, policy: str) -> None:
    """a's blocks are the oldest of the cache. Its next turn waits, because x has the only place."""
    s = sglang(policy, max_num_seqs=1, num_blocks=20)
    cached(s, heads("a", 64), heads("b", 64))
    s.arrive("x", 10, 60)
    s.step()
    s.arrive("a", heads("a", 80))
    s.scheduler._passes = 0
    pool = s.scheduler.kv_cache_manager.block_pool
    mine = {block.block_id for block in s.scheduler._cached(s.requests["a"])[1]}
    oldest = [block.block_id for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash]
    assert set(oldest[:4]) == mine
    s.scheduler._sort_waiting()
    newest = [block.block_id for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash]
    assert set(newest[-4:]) == mine
    assert newest[-1] == s.scheduler._cached(s.requests["a"])[1][0].block_id, "the end of a prefix is evicted first"


@pytest.mark.parametrize(("policy", "waiting"), [("fcfs", 1), ("fcfs", 130), ("lpm", 130)])
def test_unsorted_it_is_kept_every_32_passes(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, policy: str, waiting: int
) -> None:
    s = sglang(policy)
    kept: list[int] = []
    monkeypatch.setattr(s.scheduler, "_keep", lambda blocks: kept.append(s.scheduler._passes))
    for number in range(waiting):
        s.arrive(f"a{number}", 20)
    for _ in range(65):
        s.scheduler._sort_waiting()
    assert kept == [passes for passes in (0, 32, 64) for _ in range(min(waiting, 128))]
