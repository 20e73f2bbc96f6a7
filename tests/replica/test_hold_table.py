"""The hold table owns one reference to each held block and gives each back once, whatever happens."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.core.errors import IntegrityError
from replicas.hold_table import HoldTable


def test_blocks_go_back_tail_first() -> None:
    freed: list[int] = []
    table: HoldTable[int] = HoldTable(freed.extend)
    table.hold("a", [1, 2, 3], tokens=40, since_s=0.0, until_s=5.0)
    assert (table.num_blocks, table.num_tokens, "a" in table) == (3, 40, True)
    assert table.release("a") == 3
    assert freed == [3, 2, 1]
    assert table.release("a") == 0


def test_a_block_that_two_programs_hold_counts_once() -> None:
    table: HoldTable[int] = HoldTable(lambda blocks: None)
    table.hold("a", [1, 2, 3], tokens=48, since_s=0.0, until_s=5.0)
    table.hold("b", [1, 2, 4, 5], tokens=64, since_s=0.0, until_s=5.0)
    assert (table.num_blocks, table.num_tokens) == (5, 112)
    table.trim("b", 2, 32)
    assert table.num_blocks == 3
    table.release("a")
    assert table.num_blocks == 2
    table.check_integrity()
    table.release("b")
    assert (table.num_blocks, table.num_tokens) == (0, 0)


def test_a_trimmed_hold_keeps_its_first_blocks() -> None:
    freed: list[int] = []
    table: HoldTable[int] = HoldTable(freed.extend)
    table.hold("a", [1, 2, 3], tokens=40, since_s=0.0, until_s=5.0)
    assert table.trim("a", 1, 16) == 2
    assert (freed, table.num_blocks, table.num_tokens) == ([3, 2], 1, 16)
    table.check_integrity()
    for key, blocks, tokens in (("a", 2, 16), ("a", 1, 17), ("a", -1, 0), ("b", 0, 0)):
        with pytest.raises(IntegrityError):
            table.trim(key, blocks, tokens)
    assert table.release("a") == 1
    assert freed == [3, 2, 1]


def test_expiry_is_told_once_in_order_and_follows_an_extension() -> None:
    table: HoldTable[int] = HoldTable(lambda blocks: None)
    table.hold("late", [1], 1, 0.0, 9.0)
    table.hold("soon", [2], 1, 0.0, 2.0)
    table.hold("moved", [3], 1, 0.0, 3.0)
    table.extend("moved", 8.0)
    table.hold("gone", [4], 1, 0.0, 1.0)
    table.release("gone")
    assert table.expired(2.0) == ["soon"]
    assert table.expired(7.9) == []
    assert table.expired(9.0) == ["moved", "late"]


def test_a_hold_that_every_review_extends_costs_no_memory() -> None:
    table: HoldTable[int] = HoldTable(lambda blocks: None)
    table.hold("a", [1], 1, since_s=0.0, until_s=1.0)
    for review in range(1000):
        table.extend("a", until_s=10.0 + review % 7)
    table.extend("a", until_s=20.0)
    table.check_integrity()
    assert table.expired(19.0) == []
    assert table.expired(20.0) == ["a"]


@pytest.mark.parametrize("until_s", [float("inf"), float("nan"), -1.0])
def test_a_hold_that_would_never_end_is_refused(until_s: float) -> None:
    table: HoldTable[int] = HoldTable(lambda blocks: None)
    with pytest.raises(IntegrityError):
        table.hold("a", [1], 1, since_s=0.0, until_s=until_s)
    assert len(table) == 0


def test_a_second_hold_of_one_program_is_refused() -> None:
    table: HoldTable[int] = HoldTable(lambda blocks: None)
    table.hold("a", [1], 1, 0.0, 1.0)
    with pytest.raises(IntegrityError, match="a is held already"):
        table.hold("a", [2], 1, 0.0, 1.0)


def test_holds_come_up_in_turn_until_their_program_is_back_or_they_end() -> None:
    table: HoldTable[int] = HoldTable(lambda blocks: None)
    for key in "abcd":
        table.hold(key, [1], 1, 0.0, 9.0)
    assert [[held.key for held in table.due(2)] for _ in range(2)] == [["a", "b"], ["c", "d"]]
    table.returned("a")
    table.release("b")
    table.returned("nobody")
    assert [[held.key for held in table.due(2)] for _ in range(2)] == [["c"], ["d"]]


KEYS = st.sampled_from(["a", "b", "c", "d"])


class HoldTableMachine(RuleBasedStateMachine):
    """Blocks have reference counts, as in vLLM's pool; programs may share some."""

    def __init__(self) -> None:
        super().__init__()
        self.references: Counter[int] = Counter()
        self.table: HoldTable[int] = HoldTable(self.free)
        self.holds: dict[str, tuple[list[int], float]] = {}
        self.now_s = 0.0
        self.told: set[str] = set()

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1

    @rule(key=KEYS, blocks=st.lists(st.integers(0, 9), max_size=5, unique=True), ttl_s=st.floats(0, 10))
    def hold(self, key: str, blocks: list[int], ttl_s: float) -> None:
        if key in self.holds:
            with pytest.raises(IntegrityError):
                self.table.hold(key, blocks, len(blocks), self.now_s, self.now_s + ttl_s)
            return
        self.references.update(blocks)
        self.table.hold(key, blocks, len(blocks), self.now_s, self.now_s + ttl_s)
        self.holds[key] = (blocks, self.now_s + ttl_s)
        self.told.discard(key)

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        blocks, _ = self.holds.pop(key, ([], 0.0))
        assert self.table.release(key) == len(blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), ttl_s=st.floats(0, 10))
    def extend(self, data: st.DataObject, ttl_s: float) -> None:
        key = data.draw(st.sampled_from(sorted(self.holds)))
        self.table.extend(key, self.now_s + ttl_s)
        self.holds[key] = (self.holds[key][0], self.now_s + ttl_s)
        self.told.discard(key)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.holds)))
        blocks, until_s = self.holds[key]
        kept = data.draw(st.integers(0, len(blocks)))
        assert self.table.trim(key, kept, kept) == len(blocks) - kept
        self.holds[key] = (blocks[:kept], until_s)

    @rule(seconds=st.floats(0, 5))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        due = {key for key, (_, until_s) in self.holds.items() if until_s <= self.now_s}
        told = self.table.expired(self.now_s)
        assert len(told) == len(set(told))
        assert set(told) == due - self.told
        self.told |= set(told)

    @invariant()
    def every_reference_is_a_holds(self) -> None:
        self.table.check_integrity()
        held = Counter(block for blocks, _ in self.holds.values() for block in blocks)
        assert +self.references == held
        assert {h.key: (list(h.blocks), h.until_s) for h in self.table} == self.holds

    def teardown(self) -> None:
        for key in list(self.holds):
            self.table.release(key)
        assert not +self.references


TestHoldTableMachine = HoldTableMachine.TestCase
TestHoldTableMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
