import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.errors import ConfigError
from cluster.core.program import USER_REPLY
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution
from predictor_service.level_counts import MOST_NAMES, MOST_SEEN, LevelHistograms, LevelNames, Place, Shrinkage, View
from predictor_service.model import NO_TOOL, PauseContext, PauseOutcome, TurnContext, TurnOutcome
from predictor_service.statistics_model import FILE, StatisticsModel

TURN = TurnContext(source="made", position=2, outputs=(40, 40), tools=("bash:ls", "bash:cat"), durations_s=(0.1, 0.1))
PAUSE = PauseContext(TURN, "bash:ls", 40)
ODD_TEXT = st.text(st.characters(codec=None, categories=("L", "N", "Cs", "Cc")), max_size=8)


def turns(model: StatisticsModel, turn: TurnContext, tokens: int, tool: str, times: int) -> None:
    for _ in range(times):
        model.turn_ended(turn, TurnOutcome(tokens, tool))


def pauses(model: StatisticsModel, pause: PauseContext, seconds: float, returned: int, times: int) -> None:
    for _ in range(times):
        model.pause_ended(pause, PauseOutcome(seconds, returned))


def test_what_nothing_is_known_of_is_answered_all_the_same() -> None:
    model = StatisticsModel()
    [length], [left] = model.lengths([TurnContext()]), model.remaining([TurnContext()])
    assert length.shares.sum() == pytest.approx(1)
    assert left.tokens.shares.sum() == pytest.approx(1)
    assert model.tools([TurnContext()]) == [{NO_TOOL: 1.0}]
    assert 50 < length.mean < 1000
    assert 0.1 < model.durations([PAUSE])[0].mean < 30
    assert 1 < left.turns < 20
    assert model.lengths([]) == []


def test_much_seen_decides_and_little_seen_leans_on_what_is_more_general() -> None:
    model = StatisticsModel()
    other = replace(TURN, tools=("search", "search"))
    turns(model, TURN, 45, "bash:ls", 200)
    turns(model, other, 900, "search", 1)
    often, seldom = model.lengths([TURN, other])
    assert 40 < often.quantile(0.5) <= 50
    assert 0.02 < seldom.survival(500) < 0.9, "one turn is not enough to forget what all the others did"
    turns(model, other, 900, "search", 200)
    assert model.lengths([other])[0].survival(500) > 0.9


def test_a_call_that_was_never_seen_is_expected_as_its_tool_and_a_tool_as_all() -> None:
    model = StatisticsModel()
    pauses(model, PAUSE, 0.5, 10, 50)
    pauses(model, PauseContext(TURN, "train:gpu"), 500.0, 10, 50)
    unseen_class, unseen_tool = model.durations([PauseContext(TURN, "train:cpu"), PauseContext(TURN, "fly")])
    assert unseen_class.quantile(0.5) > 400
    assert 0.2 < unseen_tool.share_up_to(1.0) < 0.8


def test_the_same_call_is_expected_to_take_as_long_as_it_took_this_program_last() -> None:
    model = StatisticsModel()
    for seconds in (0.3, 60.0):
        pauses(model, PauseContext(replace(TURN, durations_s=(seconds, None)), "bash:ls"), seconds, 0, 40)
    slow, fast = (replace(TURN, durations_s=(seconds, None)) for seconds in (60.0, 0.3))
    after_slow, after_fast = model.durations([PauseContext(slow, "bash:ls"), PauseContext(fast, "bash:ls")])
    assert after_slow.quantile(0.5) > 30 > 1 > after_fast.quantile(0.5)


def test_tools_follow_the_last_ones_and_only_what_is_offered_is_expected() -> None:
    model = StatisticsModel()
    turns(model, TURN, 9, "edit:create", 30)
    turns(model, replace(TURN, tools=("edit:create",)), 9, "bash:python", 30)
    turns(model, TURN, 9, USER_REPLY, 3)
    [told, offered, new] = model.tools([TURN, replace(TURN, offered=("bash",)), replace(TURN, offered=("fly", "walk"))])
    assert max(told, key=lambda tool: told[tool]) == "edit:create"
    assert set(offered) == {"bash:python", USER_REPLY}
    assert set(new) == {"fly", "walk", USER_REPLY}
    assert [sum(shares.values()) for shares in (told, offered, new)] == pytest.approx([1, 1, 1])


def test_what_remains_is_told_by_the_position() -> None:
    model = StatisticsModel()
    at = [replace(TURN, position=position) for position in range(10)]
    for _ in range(30):
        model.program_ended(at, [(100 * (9 - position), 9 - position) for position in range(10)])
    first, last = model.remaining([at[0], at[9]])
    assert 7 < first.turns < 10
    assert last.turns < 1.5
    assert first.tokens.mean > 3 * last.tokens.mean


def test_first_turns_are_told_apart_by_their_prompts() -> None:
    model = StatisticsModel()
    small, large = (TurnContext(source="made", prompt_tokens=tokens) for tokens in (20, 2000))
    for _ in range(30):
        model.program_ended([small], [(100, 1)])
        model.program_ended([large], [(5000, 9)])
    after_small, after_large = model.remaining([small, large])
    assert after_large.tokens.mean > 3 * after_small.tokens.mean
    assert after_large.turns > 2 * after_small.turns


@pytest.mark.parametrize("number", [10**400, -(10**400), math.inf, math.nan, -1])
def test_a_turn_of_nonsensical_numbers_is_answered_like_any_other(number: int) -> None:
    model = StatisticsModel()
    turns(model, TURN, 40, "bash:ls", 5)
    pauses(model, PAUSE, 1.0, 5, 3)
    odd = TurnContext("made", number, number, number, (number,), ("bash:ls",), (math.inf,), (number,))
    pause = PauseContext(odd, "bash:ls", number)
    assert model.lengths([odd])[0].shares.sum() == pytest.approx(1)
    assert model.remaining([odd])[0].tokens.shares.sum() == pytest.approx(1)
    assert sum(model.tools([odd])[0].values()) == pytest.approx(1)
    assert model.durations([pause])[0].shares.sum() == pytest.approx(1)
    assert model.returned([pause])[0].shares.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "outcome", [PauseOutcome(math.nan), PauseOutcome(-1.0), PauseOutcome(math.inf), PauseOutcome(1.0, -1)]
)
def test_nonsense_is_refused_and_changes_nothing(outcome: PauseOutcome) -> None:
    model = StatisticsModel()
    pauses(model, PAUSE, 1.0, 5, 3)
    before = model.to_bytes()
    with pytest.raises(ValueError, match="not a "):
        model.pause_ended(PAUSE, outcome)
    with pytest.raises(ValueError, match="not a length"):
        model.turn_ended(TURN, TurnOutcome(-1, "t"))
    with pytest.raises(ValueError, match="not a length"):
        model.program_ended([TURN, TURN], [(1, 1), (-1, 0)])
    with pytest.raises(ValueError, match="remainders"):
        model.program_ended([TURN], [])
    assert model.to_bytes() == before


@given(ODD_TEXT, ODD_TEXT, st.integers(0, 1 << 31), st.floats(0, 1e9), st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_any_context_is_learnt_answered_and_kept(tool: str, source: str, tokens: int, seconds: float, at: int) -> None:
    turn = TurnContext(source * 100, at, at, at, (tokens,), (tool * 100,), (math.nan,), (tokens,), "", ())
    pause = PauseContext(turn, tool * 100, tokens)
    model = StatisticsModel()
    turns(model, turn, tokens, tool, 1)
    pauses(model, pause, seconds, tokens, 1)
    model.program_ended([turn], [(tokens, 3)])
    again = StatisticsModel.from_bytes(model.to_bytes())
    for answers in (model, again):
        assert answers.lengths([turn])[0].shares.sum() == pytest.approx(1)
        assert answers.durations([pause])[0].shares.sum() == pytest.approx(1)
        assert sum(answers.tools([turn])[0].values()) == pytest.approx(1)
    assert again.to_bytes() == model.to_bytes()


def test_two_writers_know_together_what_one_would_know_alone() -> None:
    alone, one, other = StatisticsModel(), StatisticsModel(), StatisticsModel()
    for index in range(60):
        for model in (alone, one if index % 3 else other):
            turns(model, TURN, 10 * index, f"t{index % 4}", 1)
            pauses(model, PAUSE, index / 7, index, 1)
            model.program_ended([TURN], [(index, index % 5)])
    one.replace_others([other.to_bytes()])
    merged = StatisticsModel.from_bytes(other.to_bytes())
    one_alone = one.to_bytes()
    merged.merge(one_alone)
    for model in (one, merged):
        assert model.lengths([TURN])[0].shares == pytest.approx(alone.lengths([TURN])[0].shares)
        assert model.durations([PAUSE])[0].shares == pytest.approx(alone.durations([PAUSE])[0].shares)
        assert model.remaining([TURN])[0].turns == pytest.approx(alone.remaining([TURN])[0].turns)
        assert model.tools([TURN])[0] == pytest.approx(alone.tools([TURN])[0])
    one.replace_others([])
    assert one.to_bytes() == one_alone, "what others told is not one's own"


def test_damage_is_refused(tmp_path: Path) -> None:
    model = StatisticsModel()
    turns(model, TURN, 5, "t", 3)
    data = model.to_bytes()
    for damaged in (b"", data[:-1], data[:20] + bytes([data[20] ^ 1]) + data[21:], b"\x00" * 40):
        with pytest.raises(ValueError, match=r"damaged|statistics"):
            StatisticsModel.from_bytes(damaged)
    model.save(tmp_path / "bundle")
    assert StatisticsModel.load(tmp_path / "bundle").to_bytes() == data
    (tmp_path / "bundle" / FILE).write_bytes(data[:-2])
    with pytest.raises(ConfigError, match=FILE):
        StatisticsModel.load(tmp_path / "bundle")
    with pytest.raises(ConfigError, match="bundle"):
        StatisticsModel.load(tmp_path)


def test_levels_are_bounded_and_what_has_seen_much_stays() -> None:
    histograms, names = LevelHistograms(LENGTH_EDGES, 100.0, Shrinkage((1.0,)), 50), LevelNames(50)
    for _ in range(40):
        histograms.add(Place([(), ("often",)]), 305.0)
        names.add([(), ("often",)], "mine")
    for index in range(500):
        histograms.add(Place([()], [View((str(index),), 0)]), 95.0)
        names.add([(), (str(index),)], f"name {index}")
    assert sum(map(len, histograms.rows())) == sum(map(len, names.rows())) == 50
    assert histograms.shares(Place([()])).argmax() == 9
    assert histograms.shares(Place([(), ("often",)])).argmax() == 30
    assert max((shares := names.shares([(), ("often",)])), key=lambda name: shares[name]) == "mine"
    assert len(names.shares([()])) == MOST_NAMES


def test_what_is_known_of_several_things_is_told_by_all_of_them() -> None:
    histograms = LevelHistograms(LENGTH_EDGES, 100.0, Shrinkage((1.0,), general=0.0))
    for value, views in ((45.0, ["a", "b"]), (450.0, ["a", "other"]), (450.0, ["other", "b"]), (450.0, ["c", "d"])):
        for _ in range(100):
            histograms.add(Place([()], [View((view,), 0) for view in views]), value)
    one = histograms.shares(Place([()], [View(("a",), 0)]))[4]
    both = histograms.shares(Place([()], [View(("a",), 0), View(("b",), 0)]))[4]
    unknown = histograms.shares(Place([()], [View(("never seen",), 0)]))[4]
    assert both > one > unknown == pytest.approx(0.25, abs=0.01)


def test_what_changes_is_learnt_anew() -> None:
    histograms = LevelHistograms(LENGTH_EDGES, 100.0, Shrinkage((1.0,)))
    for value, times in ((5.0, 3 * int(MOST_SEEN)), (95.0, int(MOST_SEEN))):
        for _ in range(times):
            histograms.add(Place([()]), value)
    assert histograms.shares(Place([()]))[9] > 0.5


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
@settings(max_examples=30, deadline=None)
def test_more_of_one_length_never_makes_it_less_likely(lengths: list[int]) -> None:
    model = StatisticsModel()
    for tokens in lengths:
        turns(model, TURN, tokens, "t", 1)
    before = model.lengths([TURN])[0]
    turns(model, TURN, 35, "t", 1)
    after = model.lengths([TURN])[0]
    assert after.shares[3] >= before.shares[3]


def test_a_forecast_covers_what_it_says() -> None:
    rng = np.random.default_rng(0)
    model = StatisticsModel()

    def call() -> tuple[PauseContext, float]:
        kind = int(rng.integers(5))
        return PauseContext(TURN, f"tool:{kind}"), float(rng.lognormal(kind - 2, 0.8))

    for _ in range(800):
        pause, seconds = call()
        pauses(model, pause, seconds, 0, 1)
    inside = 0
    for _ in range(800):
        pause, seconds = call()
        [forecast] = model.durations([pause])
        assert isinstance(forecast, Distribution)
        assert forecast.edges is DURATION_EDGES
        inside += forecast.quantile(0.05) <= seconds <= forecast.quantile(0.95)
    assert 0.86 < inside / 800 < 0.94
