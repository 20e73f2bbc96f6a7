import math
import struct
import zlib
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.program import without_class
from cluster.durations.histogram import BINS_PER_OCTAVE, EXACT
from cluster.durations.statistics import LONGEST_S, MAX_STATISTICS_BYTES, DurationStatistics
from cluster.durations.table import MAX_TOOL_NAME_BYTES, MAX_TOOLS, OVERALL, DurationTable

DURATIONS = st.floats(min_value=0, max_value=1e6, allow_subnormal=False)
SAMPLES = st.lists(DURATIONS, max_size=60)
SEEN = st.lists(DURATIONS, min_size=1, max_size=60)
ENVELOPE_BYTES = 5


def of(durations: Sequence[float]) -> DurationStatistics:
    statistics = DurationStatistics()
    for seconds in durations:
        statistics.observe(seconds)
    return statistics


def assert_same_moments(left: DurationStatistics, right: DurationStatistics) -> None:
    assert left.count == right.count
    assert (left.min_s, left.max_s) == (right.min_s, right.max_s)
    assert left.mean_s == pytest.approx(right.mean_s, rel=1e-9, abs=1e-9)
    # What cancels in M2 is of the size of the squares.
    assert left.m2 == pytest.approx(right.m2, rel=1e-6, abs=1e-9 * (1 + left.max_s**2))


@given(SEEN)
def test_the_moments_are_those_of_the_whole_sample(durations: list[float]) -> None:
    statistics = of(durations)
    assert statistics.count == len(durations)
    assert statistics.mean_s == pytest.approx(np.mean(durations), rel=1e-9, abs=1e-12)
    assert statistics.variance == pytest.approx(np.var(durations), rel=1e-6, abs=1e-9 * (1 + max(durations) ** 2))
    assert statistics.range_s == max(durations) - min(durations)


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, -math.inf, LONGEST_S * 1.01])
def test_what_is_no_duration_is_refused_and_changes_nothing(seconds: float) -> None:
    statistics, table = of([1.0, 2.0]), DurationTable()
    with pytest.raises(ValueError, match="not a duration"):
        statistics.observe(seconds)
    assert_same_moments(statistics, of([1.0, 2.0]))
    with pytest.raises(ValueError, match="not a duration"):
        table.observe("python", seconds)
    assert (table.overall.count, table.tool("python")) == (0, None)


@given(SAMPLES, SAMPLES)
def test_a_merge_has_seen_both_sides_in_any_order_and_changes_neither(left: list[float], right: list[float]) -> None:
    one, other = of(left), of(right)
    before = one.to_bytes(), other.to_bytes()
    assert_same_moments(one.merge(other), of(left + right))
    assert_same_moments(one.merge(other), other.merge(one))
    assert (one.to_bytes(), other.to_bytes()) == before


@given(SAMPLES, SAMPLES, SAMPLES)
def test_merges_group_as_they_like(a: list[float], b: list[float], c: list[float]) -> None:
    assert_same_moments(of(a).merge(of(b)).merge(of(c)), of(a).merge(of(b).merge(of(c))))


@given(st.lists(SEEN, min_size=1, max_size=6), st.floats(min_value=0, max_value=1))
def test_few_durations_have_exact_quantiles(parts: list[list[float]], q: float) -> None:
    merged = DurationStatistics()
    for part in parts:
        merged = merged.merge(of(part[:10]))
    exact = np.sort([seconds for part in parts for seconds in part[:10]])
    rank = math.ceil(q * len(exact))
    # One rank of room, because q * n is rounded here and there.
    around = exact[max(rank - 2, 0) : rank + 1]
    assert around[0] <= merged.quantile(q) <= around[-1]


@pytest.mark.parametrize("writers", [1, 8])
def test_many_durations_have_quantiles_that_are_at_most_a_bin_too_long(writers: int) -> None:
    values = np.random.default_rng(7).lognormal(0.0, 1.5, 40_000)
    merged = DurationStatistics()
    for part in np.array_split(values, writers):
        merged = merged.merge(of(part.tolist()))
    ordered = np.sort(values)
    for q in (0.001, 0.1, 0.5, 0.9, 0.99, 0.999):
        exact = float(ordered[math.ceil(q * len(values)) - 1])
        assert exact <= merged.quantile(q) <= exact * (1 + 1 / BINS_PER_OCTAVE)
        shorter, longer = np.searchsorted(ordered, [exact / (1 + 1 / BINS_PER_OCTAVE), exact], "right") / len(values)
        assert 1 - longer <= merged.survival(exact) <= 1 - shorter


def test_a_tool_that_always_takes_one_of_two_times_keeps_them_exactly() -> None:
    statistics = of([0.1] * 3000 + [7.3] * 1000)
    assert [statistics.quantile(q) for q in (0.01, 0.75, 0.76)] == [0.1, 0.1, 7.3]
    assert [statistics.survival(t) for t in (0.0999, 0.1, 7.2999, 7.3)] == [1.0, 0.25, 0.25, 0.0]


@given(st.lists(DURATIONS, min_size=1, max_size=3 * EXACT), st.randoms(use_true_random=False))
def test_neither_order_nor_grouping_nor_chance_changes_the_shape(durations: list[float], random: Random) -> None:
    whole = of(durations)
    shuffled = random.sample(durations, len(durations))
    cut = random.randrange(len(durations) + 1)
    merged = of(shuffled[:cut]).merge(of(shuffled[cut:]))
    twice = of(shuffled[cut:]).merge(of(shuffled[:cut]))
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert whole.quantile(q) == merged.quantile(q) == twice.quantile(q)
    for t in durations[:5]:
        assert whole.survival(t) == merged.survival(t) == twice.survival(t)


@given(SEEN, st.lists(st.floats(min_value=-1, max_value=2e6), min_size=2, max_size=10))
def test_survival_falls_from_one_to_zero_and_matches_the_sample(durations: list[float], times: list[float]) -> None:
    statistics = of(durations)
    shares = [statistics.survival(t) for t in sorted(times)]
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= share <= 1 for share in shares)
    assert statistics.survival(max(durations)) == 0
    assert statistics.survival(math.nextafter(min(durations), -math.inf)) == 1


def test_survival_of_a_small_sample_is_the_share_that_is_longer() -> None:
    statistics = of([1.0, 2.0, 2.0, 4.0])
    assert [statistics.survival(t) for t in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)] == [1.0, 0.75, 0.75, 0.25, 0.25, 0.0]


@given(SEEN, st.floats(min_value=0, max_value=1e6), st.floats(min_value=1e-3, max_value=1e6))
def test_hazard_is_the_share_of_the_survivors_that_ends_in_the_window(
    durations: list[float], t: float, window_s: float
) -> None:
    statistics = of(durations)
    running = statistics.survival(t)
    ends = statistics.hazard(t, window_s) * window_s
    if running == 0:
        assert ends == 0
    else:
        assert 0 <= ends <= 1 + 1e-9
        assert running * (1 - ends) == pytest.approx(statistics.survival(t + window_s), abs=1e-9)


def test_hazard_by_hand() -> None:
    statistics = of([1.0, 2.0, 3.0, 10.0])
    assert statistics.hazard(1.0, 1.0) == pytest.approx(1 / 3)
    assert statistics.hazard(2.0, 10.0) == pytest.approx(1 / 10)
    assert statistics.hazard(10.0, 1.0) == 0


def test_bernstein_bound_by_hand() -> None:
    statistics = of([1.0, 3.0])
    doubt = math.log(2 / 0.1)  # the sample variance is 2, and n - 1 is 1
    assert statistics.bernstein_bound_s(0.1) == pytest.approx(2 + math.sqrt(2 * 2 * doubt / 2) + 7 * 2 * doubt / 3)
    assert of([5.0]).bernstein_bound_s(0.1) == 5


@given(SEEN, st.floats(min_value=1e-6, max_value=0.999))
def test_the_bound_is_above_the_mean_and_comes_closer_with_more_of_the_same(
    durations: list[float], delta: float
) -> None:
    statistics = of(durations)
    bound_s = statistics.bernstein_bound_s(delta)
    twice = statistics.merge(statistics)
    assert bound_s >= statistics.mean_s
    assert twice.bernstein_bound_s(delta) <= bound_s * (1 + 1e-9) + 1e-9
    assert statistics.bernstein_bound_s(delta / 2) >= bound_s
    if statistics.range_s > 1e-3:
        assert twice.bernstein_bound_s(delta) < bound_s


def test_questions_that_have_no_answer() -> None:
    empty, one = DurationStatistics(), of([1.0])
    assert (empty.mean_s, empty.variance, empty.range_s, one.variance) == (0, 0, 0, 0)
    for question in (
        lambda: empty.quantile(0.5),
        lambda: empty.survival(1.0),
        lambda: empty.hazard(1.0, 1.0),
        lambda: empty.bernstein_bound_s(0.1),
        lambda: one.quantile(1.01),
        lambda: one.quantile(math.nan),
        lambda: one.survival(math.nan),
        lambda: one.hazard(1.0, 0.0),
        lambda: one.bernstein_bound_s(0.0),
        lambda: one.bernstein_bound_s(1.0),
    ):
        with pytest.raises(ValueError, match=r".+"):
            question()


# --- bytes --------------------------------------------------------------------------------------------------------


@given(st.lists(DURATIONS, max_size=200), st.integers(min_value=0, max_value=3))
def test_bytes_give_the_same_statistics(durations: list[float], doublings: int) -> None:
    statistics = of(durations)
    for _ in range(doublings):
        statistics = statistics.merge(statistics)
    back = DurationStatistics.from_bytes(statistics.to_bytes())
    assert_same_moments(back, statistics)
    assert back.to_bytes() == statistics.to_bytes()
    if durations:
        assert [back.quantile(q) for q in (0, 0.3, 0.9, 1)] == [statistics.quantile(q) for q in (0, 0.3, 0.9, 1)]
        back.observe(3.0)
        assert back.count == statistics.count + 1
        assert DurationStatistics.from_bytes(back.to_bytes()).count == back.count


def test_bytes_of_very_many_durations_stay_small_and_readable() -> None:
    statistics = of(np.geomspace(1e-9, LONGEST_S, 100_000).tolist())
    for _ in range(25):
        statistics = statistics.merge(statistics)
        DurationStatistics.from_bytes(statistics.to_bytes())
    assert statistics.count > 1 << 41
    assert len(statistics.to_bytes()) < MAX_STATISTICS_BYTES / 2


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    for reader in (DurationStatistics.from_bytes, DurationTable.from_bytes):
        if data != DurationTable().to_bytes() and data != b"\x80":
            with pytest.raises(ValueError, match=r".+"):
                reader(data)


def test_a_value_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="not duration statistics"):
        DurationStatistics.from_bytes(of([1.0]).to_bytes() + bytes(MAX_STATISTICS_BYTES))


@given(st.sampled_from([1, 4, 5, 80, 3000]), st.data())
def test_damaged_bytes_are_refused(count: int, data: st.DataObject) -> None:
    whole = of([float(i) for i in range(count)]).to_bytes()
    place = data.draw(st.integers(min_value=0, max_value=len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place] ^= data.draw(st.integers(min_value=1, max_value=255))
    for damaged in (bytes(flipped), whole[:place], whole + b"\0"):
        with pytest.raises(ValueError, match="duration statistics"):
            DurationStatistics.from_bytes(damaged)


def forged(body: bytes) -> bytes:
    version = of([1.0]).to_bytes()[0]
    return struct.pack("<BI", version, zlib.crc32(body)) + body


@given(st.sampled_from([1, 4, 5, 80, 3000]), st.data())
def test_forged_bytes_are_refused_or_harmless(count: int, data: st.DataObject) -> None:
    """Their checksum is right. They must neither end this process nor take its memory."""
    body = bytearray(of([float(i) for i in range(count)]).to_bytes()[ENVELOPE_BYTES:])
    near_the_front = st.integers(min_value=0, max_value=min(len(body), 120) - 1)
    for place in data.draw(st.lists(near_the_front, min_size=1, max_size=4)):
        body[place] = data.draw(st.integers(min_value=0, max_value=255))
    try:
        statistics = DurationStatistics.from_bytes(forged(bytes(body)))
    except ValueError:
        return
    merged = of([1.0]).merge(statistics).merge(statistics)
    merged.observe(2.0)
    assert merged.count == 2 * statistics.count + 2
    DurationStatistics.from_bytes(merged.to_bytes())


@pytest.mark.parametrize("item", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("count", [2, 200])
def test_a_forged_item_that_is_no_duration_is_refused(count: int, item: float) -> None:
    body = bytearray(of([1.0] * count).to_bytes()[ENVELOPE_BYTES:])
    place = body.rindex(struct.pack("<d", 1.0))
    body[place : place + 8] = struct.pack("<d", item)
    with pytest.raises(ValueError, match="what are no durations"):
        DurationStatistics.from_bytes(forged(bytes(body)))


# --- tables -------------------------------------------------------------------------------------------------------


def table_of(**durations: list[float]) -> DurationTable:
    table = DurationTable()
    for tool, all_s in durations.items():
        for seconds in all_s:
            table.observe(tool, seconds)
    return table


def test_a_table_answers_for_own_and_others_together() -> None:
    table, other = table_of(python=[1.0, 3.0], search=[5.0]), table_of(python=[8.0], shell=[2.0])
    assert table.tool("shell") is None
    table.replace_others(other.own())
    assert_same_moments(table.tool("python"), of([1.0, 3.0, 8.0]))
    assert_same_moments(table.tool("search"), of([5.0]))
    assert_same_moments(table.tool("shell"), of([2.0]))
    assert_same_moments(table.overall, of([1.0, 3.0, 5.0, 8.0, 2.0]))
    assert {name: part.count for name, part in table.own().items()} == {OVERALL: 3, "python": 2, "search": 1}


def test_a_tool_is_known_with_its_arguments_and_without() -> None:
    table = DurationTable()
    for tool, seconds in (("bash:ls", 0.1), ("bash:ls", 0.3), ("bash:make", 60.0), ("search", 2.0)):
        table.observe(tool, seconds)

    def counts(name: str) -> list[int]:
        return [statistics.count for statistics in table.levels(name)]

    assert counts("bash:ls") == [2, 3, 4]
    assert counts("bash:rm") == [3, 4], "never seen with such arguments: as the tool in general"
    assert counts("search") == [1, 4]
    assert counts("no such tool") == [4]
    assert next(statistics.mean_s for statistics in table.levels("bash:ls")) == pytest.approx(0.2)
    assert list(DurationTable().levels("bash:ls")) == []
    assert without_class("bash:cd+bash:ls+search") == "bash+search"


def test_answers_are_kept_until_a_side_changes() -> None:
    table, other = table_of(python=[1.0], search=[1.0]), table_of(python=[8.0], search=[1.0])
    table.replace_others(other.own())
    first = table.tool("python"), table.tool("search"), table.overall
    assert (table.tool("python"), table.tool("search"), table.overall) == first
    table.observe("python", 2.0)
    assert table.tool("search") is first[1]
    assert_same_moments(table.tool("python"), of([1.0, 8.0, 2.0]))
    assert table.overall.count == 5
    table.replace_others({})
    assert_same_moments(table.tool("python"), of([1.0, 2.0]))
    assert table.overall.count == 3


def test_the_tool_observed_longest_ago_is_forgotten_but_not_its_share_of_the_overall() -> None:
    table = DurationTable()
    for i in range(MAX_TOOLS):
        table.observe(f"tool-{i}", 1.0)
    table.observe("tool-0", 1.0)
    table.observe("one more", 1.0)
    assert table.tool("tool-1") is None
    assert table.tool("tool-0").count == 2
    assert table.overall.count == MAX_TOOLS + 2
    assert len(table.own()) == MAX_TOOLS + 1
    table.replace_others({f"other-{i}": of([1.0] * (1 + (i < 3))) for i in range(2 * MAX_TOOLS)})
    known = [i for i in range(2 * MAX_TOOLS) if table.tool(f"other-{i}") is not None]
    assert len(known) == MAX_TOOLS and known[:3] == [0, 1, 2]


@pytest.mark.parametrize("name", ["", "x" * (MAX_TOOL_NAME_BYTES + 1), "ä" * MAX_TOOL_NAME_BYTES])
def test_a_name_that_cannot_be_a_key_counts_for_the_overall_only(name: str) -> None:
    table = table_of(**{name: [1.0]})
    assert table.overall.count == 1
    assert list(table.own()) == [OVERALL]


@given(st.dictionaries(st.text(max_size=8) | st.just("\ud800 half"), SEEN, max_size=5))
def test_a_tables_bytes_give_its_own_part_back(durations: dict[str, list[float]]) -> None:
    table = table_of(**durations)
    table.replace_others(table_of(python=[1.0]).own())
    back = DurationTable.from_bytes(table.to_bytes())
    assert back.own().keys() == table.own().keys()
    for name, part in table.own().items():
        assert_same_moments(back.own()[name], part)
    assert back.to_bytes() == table.to_bytes()


def test_a_table_with_more_tools_than_allowed_is_refused() -> None:
    part = of([1.0]).to_bytes()
    packed = b"".join(
        b"\xc4\x02" + struct.pack(">H", i) + b"\xc5" + struct.pack(">H", len(part)) + part for i in range(2000)
    )
    with pytest.raises(ValueError, match="at most"):
        DurationTable.from_bytes(b"\xde" + struct.pack(">H", 2000) + packed)
