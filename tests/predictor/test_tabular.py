import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.errors import ConfigError
from predictor_service.bundle import read_bundle, write_bundle
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES
from predictor_service.features import FEATURES_VERSION
from predictor_service.model import PauseContext, PauseOutcome, TurnContext, TurnOutcome
from predictor_service.statistics_model import StatisticsModel
from predictor_service.tabular import LARGEST_SCORE, TabularModel, normal_scores
from tests.predictor import learnable

TRAIN = learnable.programs(150)
TEST = [turn for program in learnable.programs(40, seed=1) for turn in program.turns]


@pytest.fixture(scope="module")
def model() -> TabularModel:
    return TabularModel.fit(TRAIN)


def crps(answers, values) -> float:
    return float(np.mean([answer.crps(value) for answer, value in zip(answers, values, strict=True)]))


def test_lengths_that_depend_on_a_word_are_learnt_better_than_by_statistics(model) -> None:
    contexts, lengths = [turn.context for turn in TEST], [turn.outcome.output_tokens for turn in TEST]
    ours, theirs = (crps(each.lengths(contexts), lengths) for each in (model, model.statistics))
    assert ours < theirs / 4


def test_durations_that_depend_on_an_argument_are_learnt_better_than_by_statistics(model) -> None:
    paused = [turn for turn in TEST if turn.pause is not None and turn.pause_outcome is not None]
    pauses, seconds = [turn.pause for turn in paused], [turn.pause_outcome.duration_s for turn in paused]
    ours, theirs = (crps(each.durations(pauses), seconds) for each in (model, model.statistics))
    assert ours < theirs / 3


def test_what_is_left_shrinks_from_turn_to_turn(model) -> None:
    first, last = model.remaining([TEST[0].context, TEST[5].context])
    assert first.turns > 3 and last.turns < 1
    assert first.tokens.mean > 400 and last.tokens.mean < 100


def test_a_bundle_answers_as_the_model_did(model, tmp_path: Path) -> None:
    model.save(tmp_path)
    read = TabularModel.load(tmp_path)
    contexts = [turn.context for turn in TEST[:20]]
    for one, other in zip(model.lengths(contexts), read.lengths(contexts), strict=True):
        assert np.array_equal(one.shares, other.shares)


def test_the_same_programs_and_seed_give_the_same_model(model) -> None:
    again = TabularModel.fit(TRAIN)
    [one], [other] = (each.lengths([TEST[0].context]) for each in (model, again))
    assert np.allclose(one.shares, other.shares, atol=1e-5)


def test_answers_do_not_depend_on_the_batch(model) -> None:
    contexts = [turn.context for turn in TEST[:9]]
    for context, together in zip(contexts, model.lengths(contexts), strict=True):
        assert np.allclose(model.lengths([context])[0].shares, together.shares, atol=1e-6)
    assert model.lengths([]) == model.remaining([]) == model.durations([]) == model.returned([]) == []


def test_what_it_corrects_can_be_statistics_that_go_on_learning(model) -> None:
    learning = StatisticsModel.from_bytes(model.statistics.to_bytes())
    adapted = model.with_prior(learning)
    new = TurnContext(source="new")
    [before] = adapted.lengths([new])
    for _ in range(200):
        learning.turn_ended(new, TurnOutcome(9000, "bash:make"))
    assert np.array_equal(model.lengths([new])[0].shares, before.shares)
    assert adapted.lengths([new])[0].survival(8000) > before.survival(8000)


number = st.integers(-10, 10**12)


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(st.characters(), max_size=50),
    number=number,
    history=st.lists(number, max_size=9),
    seconds=st.lists(st.one_of(st.none(), st.floats()), max_size=9),
)
def test_nonsense_is_answered_by_distributions(model, text, number, history, seconds) -> None:
    position = max(0, number)
    turn = TurnContext(
        text, position, number, number, tuple(history), (text,) * 3, tuple(history), tuple(history), text
    )
    answers = [(*model.lengths([turn]), LENGTH_EDGES), (model.remaining([turn])[0].tokens, LENGTH_EDGES)]
    pause = PauseContext(turn, text, number, text)
    answers += [(*model.durations([pause]), DURATION_EDGES), (*model.returned([pause]), LENGTH_EDGES)]
    for answer, edges in answers:
        assert answer.edges is edges
        assert np.isfinite(answer.shares).all() and answer.shares.min() >= 0
        assert answer.shares.sum() == pytest.approx(1)


def rewritten(directory: Path, **changes: Any) -> None:
    """A bundle that is whole, with another content."""
    write_bundle(directory, replace(read_bundle(directory), **changes))


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"lengths.lightgbm.txt": None}, r"lengths\.lightgbm\.txt: is not in the bundle"),
        (
            {"lengths.lightgbm.txt": b"no trees"},
            r"lengths\.lightgbm\.txt: Model file doesn't specify the number of classes",
        ),
        ({"returned.lightgbm.txt": b"\xff"}, r"returned\.lightgbm\.txt: .*ascii"),
        ({"turns.lightgbm.txt": "durations.lightgbm.txt"}, r"turns\.lightgbm\.txt: has \d+ features, not \d+"),
    ],
)
def test_wrong_trees_are_rejected_by_name(
    model: TabularModel, tmp_path: Path, parts: dict[str, bytes | str | None], complaint: str
) -> None:
    model.save(tmp_path)
    there = dict(read_bundle(tmp_path).parts)
    for name, content in parts.items():
        if content is None:
            del there[name]
        else:
            there[name] = there[content] if isinstance(content, str) else content
    rewritten(tmp_path, parts=there)
    with pytest.raises(ConfigError, match=complaint):
        TabularModel.load(tmp_path)


@pytest.mark.parametrize("spreads", [None, {"lengths": {"made": 1.0}}, {"lengths": {"": 0.0}}, {"weather": {"": 1.0}}])
def test_wrong_spreads_are_rejected(model: TabularModel, tmp_path: Path, spreads: object) -> None:
    model.save(tmp_path)
    rewritten(tmp_path, settings={"spreads": spreads})
    with pytest.raises(ConfigError, match=r"dict|spreads|lengths"):
        TabularModel.load(tmp_path)


def test_a_bundle_for_older_features_or_without_its_statistics_is_refused(model, tmp_path: Path) -> None:
    model.save(tmp_path)
    rewritten(tmp_path, features_version=FEATURES_VERSION - 1)
    with pytest.raises(ConfigError, match="features_version"):
        TabularModel.load(tmp_path)
    rewritten(tmp_path, features_version=FEATURES_VERSION, parts={})
    with pytest.raises(ConfigError, match=r"statistics\.bin: is not in the bundle"):
        TabularModel.load(tmp_path)
    rewritten(tmp_path, parts={"statistics.bin": b"abcdefgh"})
    with pytest.raises(ConfigError, match="damaged"):
        TabularModel.load(tmp_path)


def test_a_value_beyond_all_that_was_expected_has_a_finite_score() -> None:
    """Shares are rounded: their sum can be larger than 1."""
    prior = np.array([[0.5, 0.5 + 1e-9], [0.5, 0.5]])
    scores = normal_scores(prior, np.array([0.0, 10.0, 20.0]), np.array([1e9, 0.0]))
    assert scores.tolist() == [LARGEST_SCORE, -LARGEST_SCORE]


def test_too_little_to_learn_from_is_said() -> None:
    with pytest.raises(ConfigError, match=r"too little to learn from: .* turns"):
        TabularModel.fit(learnable.programs(3))


def test_sources_without_durations_can_be_learnt() -> None:
    unrecorded = [
        replace(
            program,
            turns=tuple(replace(t, pause_outcome=t.pause_outcome and PauseOutcome(None, 20)) for t in program.turns),
        )
        for program in TRAIN[:60]
    ]
    model = TabularModel.fit(unrecorded)
    assert model.durations([learnable.pause(random.Random(0), True)])[0].shares.sum() == pytest.approx(1)
