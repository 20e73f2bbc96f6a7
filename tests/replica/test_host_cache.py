"""What the host tier keeps and what it gives up, told on vLLM's own block bookkeeping. A chunk is 16 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key

from cluster.core.errors import IntegrityError
from replicas.host_tier import HostCache, Standing

CHUNK = 16


def context(name: str, count: int, shared: int = 0) -> list[OffloadKey]:
    """``count`` chunks, of which the first ``shared`` are everybody's."""
    return [make_offload_key(f"{'all' if i < shared else name}{i}".encode(), 0) for i in range(count)]


class Tier:
    """A HostCache and the turns on it."""

    def __init__(self, num_chunks: int, share: float = 1.0) -> None:
        self.cache = HostCache(num_chunks, CHUNK, share, enable_events=False)
        self.now_s = 0.0

    def resident(self, program: str, saved_s: float = 1.0, pause_s: float = 1.0) -> None:
        self.cache.update(program, Standing(True, saved_s, pause_s, self.now_s), self.now_s)

    def away(self, program: str, saved_s: float = 1.0, pause_s: float = 1.0) -> None:
        self.cache.update(program, Standing(False, saved_s, pause_s, self.now_s), self.now_s)

    def turn(self, program: str | None, keys: list[OffloadKey], request: str = "r", stored_at_once: int = 100) -> int:
        """A turn comes, stores its chunks as vLLM does, and ends; chunks taken."""
        request = f"{program}-{request}"
        if program is not None:
            standing = self.cache.chunks.accounts[program].standing
            self.cache.update(program, standing, self.now_s, request)
        ctx, taken = ReqContext(request), 0
        self.cache.on_new_request(ctx)
        self.cache.touch(keys, ctx)
        for begin in range(0, len(keys), stored_at_once):
            output = self.cache.prepare_store(keys[begin : begin + stored_at_once], ctx)
            assert output is not None
            self.cache.touch(keys[: begin + stored_at_once], ctx)
            self.cache.complete_store(output.keys_to_store, ctx)
            taken += len(output.keys_to_store)
        self.cache.on_request_finished(ctx)
        return taken

    def has(self, program: str) -> int:
        tokens = self.cache.tokens_of(program)
        assert tokens % CHUNK == 0
        return tokens // CHUNK

    def hits(self, keys: list[OffloadKey]) -> int:
        return sum(self.cache.lookup(key, ReqContext("x")) is LookupResult.HIT for key in keys)


def test_a_program_that_ended_goes_before_one_that_lives() -> None:
    tier = Tier(10)
    for program in "ab":
        tier.resident(program, saved_s=5.0)
        tier.turn(program, context(program, 5))
        tier.away(program, saved_s=5.0)
    tier.cache.forget("b")
    tier.resident("c", saved_s=0.1)
    assert tier.turn("c", context("c", 5)) == 5
    assert (tier.has("a"), tier.has("b"), tier.has("c")) == (5, 0, 5)
    assert tier.hits(context("b", 5)) == 0


def test_turns_without_a_program_are_kept_while_there_is_room_and_in_order_of_use() -> None:
    tier = Tier(6)
    tier.turn(None, context("x", 3), "1")
    tier.turn(None, context("y", 3), "2")
    tier.turn(None, context("x", 3), "3")
    tier.turn(None, context("z", 3), "4")
    assert [tier.hits(context(name, 3)) for name in "xyz"] == [3, 0, 3]


def test_a_copy_of_what_the_device_has_goes_before_the_only_copy() -> None:
    tier = Tier(10)
    for program in "ab":
        tier.resident(program)
        tier.turn(program, context(program, 5))
    tier.away("a", saved_s=1.0)  # worth no more than b
    tier.resident("c", saved_s=2.0)
    tier.turn("c", context("c", 3))
    assert (tier.has("a"), tier.has("b"), tier.has("c")) == (5, 2, 3)


def test_who_is_worth_least_goes_first_and_its_last_chunks_before_its_first() -> None:
    tier = Tier(9)
    for program, pause_s in [("long", 100.0), ("short", 1.0), ("middle", 10.0)]:
        tier.resident(program, pause_s=pause_s)
        tier.turn(program, context(program, 3))
        tier.away(program, pause_s=pause_s)
    tier.resident("new", pause_s=0.5)
    tier.turn("new", context("new", 4))
    assert [tier.has(program) for program in ("long", "middle", "short", "new")] == [0, 2, 3, 4]
    assert tier.hits(context("middle", 2)) == 2


def test_nobody_is_evicted_for_a_program_that_is_worth_less() -> None:
    tier = Tier(5)
    tier.resident("a", saved_s=2.0)
    tier.turn("a", context("a", 4))
    tier.away("a", saved_s=2.0)
    tier.resident("b", saved_s=1.0)
    assert tier.turn("b", context("b", 3)) == 1
    assert (tier.has("a"), tier.has("b"), tier.cache.refused_chunks) == (4, 1, 2)
    assert not tier.cache.could_hold("b", 3 * CHUNK)
    tier.now_s = 10.0  # a has been away ten times as long as expected: it may be gone
    tier.away("b", saved_s=1.0)
    assert tier.cache.could_hold("b", 3 * CHUNK + 5)


def test_a_refused_turn_takes_nothing_behind_the_gap_until_it_is_reopened() -> None:
    tier = Tier(8, share=0.5)
    keys = context("a", 6)
    tier.resident("a")
    tier.cache.update("a", Standing(True, 1.0, 1.0, 0.0), 0.0, "a-r")
    ctx = ReqContext("a-r")
    tier.cache.touch(keys, ctx)
    assert [len(tier.cache.prepare_store(keys[i : i + 1], ctx).keys_to_store) for i in range(6)] == [1, 1, 1, 1, 0, 0]  # type: ignore[union-attr]
    tier.cache.complete_store(keys[:4], ctx)
    assert tier.has("a") == 4
    tier.cache.chunks.remove(keys[0])
    assert tier.cache.prepare_store(keys[:1], ctx).keys_to_store == []  # type: ignore[union-attr]
    tier.cache.reopen("a-r")
    assert tier.cache.prepare_store(keys[:1], ctx).keys_to_store == keys[:1]  # type: ignore[union-attr]


def test_no_program_takes_more_than_its_share() -> None:
    tier = Tier(20, share=0.25)
    tier.resident("a", saved_s=9.0)
    assert tier.turn("a", context("a", 12), stored_at_once=1) == 5
    assert (tier.has("a"), tier.cache.could_hold("a", 5 * CHUNK), tier.cache.could_hold("a", 6 * CHUNK)) == (
        5,
        True,
        False,
    )


def test_a_shared_beginning_goes_with_the_last_program_that_has_it() -> None:
    tier = Tier(10)
    for program, pause_s in [("a", 100.0), ("b", 1.0)]:
        tier.resident(program, pause_s=pause_s)
        tier.turn(program, context(program, 6, shared=3))
        tier.away(program, pause_s=pause_s)
    assert tier.cache.used_tokens == 9 * CHUNK
    tier.resident("c", pause_s=10.0)
    assert tier.turn("c", context("c", 8)) == 4
    assert (tier.has("a"), tier.has("b"), tier.has("c")) == (3, 6, 4)


def test_what_a_program_no_longer_extends_is_nobodys() -> None:
    tier = Tier(10)
    tier.resident("a")
    tier.turn("a", context("old", 6, shared=2), "1")
    tier.turn("a", context("new", 5, shared=2), "2")  # the client shortened its history
    assert tier.has("a") == 5
    tier.resident("b", saved_s=0.5)
    assert tier.turn("b", context("b", 5)) == 5
    assert (tier.has("a"), tier.has("b"), tier.hits(context("old", 6)[2:])) == (5, 5, 0)


def test_a_reset_empties_the_tier_and_it_fills_again() -> None:
    tier = Tier(4)
    tier.resident("a")
    tier.turn("a", context("a", 4))
    tier.cache.reset_cache()
    assert (tier.has("a"), tier.cache.used_tokens) == (0, 0)
    tier.turn("a", context("a", 4), "2")
    assert tier.has("a") == 4


def test_programs_without_a_chunk_are_not_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the programs that have paused have none on a full tier. Nothing of the order of eviction changes."""
    tier, worth, ranked = Tier(12), Standing.worth, 0

    def counted(standing: Standing, now_s: float) -> float:
        nonlocal ranked
        ranked += 1
        return worth(standing, now_s)

    for number in range(5000):
        tier.away(f"empty{number}", saved_s=0.0)
    for program, pause_s in [("a", 100.0), ("b", 100.0), ("c", 1.0), ("d", 10.0)]:
        tier.resident(program, pause_s=pause_s)
        tier.turn(program, context(program, 3))
        tier.away(program, pause_s=pause_s)
    monkeypatch.setattr(Standing, "worth", counted)
    for number in range(100):
        tier.away(f"empty{number}")
        tier.resident("new", pause_s=0.5)
        assert tier.turn("new", context("new", 5), str(number)) == (0 if number else 5)
    assert [tier.has(program) for program in "abcd"] == [0, 1, 3, 3]
    assert ranked < 100
    assert tier.turn("new", context("new", 8), "longer") == 3
    assert [tier.has(program) for program in "abcd"] == [0, 0, 3, 1]
    assert ranked < 100


def test_a_program_can_be_evicted_from_its_first_chunk_on() -> None:
    """No program is updated between its own store and that of the next one."""
    tier = Tier(4)
    for number in range(2):
        for saved_s in (1.0, 2.0, 3.0):
            program = f"worth {saved_s}"
            tier.resident(program, saved_s)
            assert tier.turn(program, context(program, 4), str(number)) == 4
        tier.cache.reset_cache()


@pytest.mark.parametrize("asked", [False, True])
def test_a_context_that_another_program_stores_again_counts_until_it_has_gone(asked: bool) -> None:
    tier, keys = Tier(4), context("a", 4, shared=4)

    def fill() -> None:
        tier.resident("rich", saved_s=9.0)
        assert tier.turn("rich", context("rich", 4)) == 4

    tier.resident("a")
    tier.turn("a", keys)
    tier.away("a")
    fill()
    assert not asked or tier.has("a") == 0
    tier.cache.forget("rich")
    tier.resident("b")
    assert tier.turn("b", keys) == 4
    assert tier.has("a") == 4
    tier.cache.forget("b")
    assert tier.has("a") == 4
    fill()
    assert tier.has("a") == 0
    tier.cache.chunks.check_integrity()


def test_a_count_that_is_wrong_is_found() -> None:
    tier = Tier(4)
    tier.resident("a")
    tier.turn("a", context("a", 3))
    tier.cache.chunks.accounts["a"].leading = 4
    with pytest.raises(IntegrityError, match="counts 4"):
        tier.cache.chunks.check_integrity()


PROGRAMS = st.sampled_from(["a", "b", "c", "d", None])
TURNS = st.lists(
    st.tuples(PROGRAMS, st.integers(1, 8), st.integers(0, 3), st.booleans(), st.integers(1, 4), st.booleans()),
    max_size=40,
)


@pytest.mark.parametrize("share", [1.0, 0.4])
@given(turns=TURNS)
def test_whatever_comes_chunks_and_owners_add_up(share: float, turns: list[tuple]) -> None:  # type: ignore[type-arg]
    tier = Tier(10, share)
    contexts: dict[str, list[OffloadKey]] = {}
    for number, (program, count, shared, away, pause, ends) in enumerate(turns):
        tier.now_s += 0.5
        if program is not None:
            tier.resident(program, pause_s=pause)
        keys = context(program or "none", count, shared)
        tier.turn(program, keys, str(number), stored_at_once=pause)
        if program is not None and away:
            tier.away(program, pause_s=pause)
        if program is not None and ends:
            tier.cache.forget(program)
        chunks = tier.cache.chunks
        chunks.check_integrity()
        assert len(chunks.blocks) <= 10
        assert all(len(account.chunks) <= tier.cache.quota_chunks + 3 for account in chunks.accounts.values())
        if program is not None:
            contexts[program] = keys
        contexts = {name: known for name, known in contexts.items() if name in chunks.accounts}
        for name, known in contexts.items():
            assert tier.has(name) == next((i for i, key in enumerate(known) if key not in chunks.blocks), len(known))
        chunks.check_integrity()
