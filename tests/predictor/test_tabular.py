import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from predictor_service.bundle import read_bundle, write_bundle
from predictor_service.context import PauseContext, TurnContext
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES
from predictor_service.features import FEATURES_VERSION
from predictor_service.model import PauseOutcome, TurnOutcome
from predictor_service.statistics_model import StatisticsModel
from predictor_service.tabular import TabularModel
from tests.predictor import learnable

TRAIN = learnable.programs(150)
TEST = [turn for program in learnable.programs(40, seed=1) for turn in program.turns]


@pytest.fixture(scope="module")
def model() -> TabularModel:
    return TabularModel.fit(TRAIN)


def crps(answers, values) -> float:
    return float(np.mean([answer.crps(value) for answer, value in zip(answers, values, strict=True)]))


def test_lengths_that_depend_on_a_word_are_learnt_better_than_by_statistics(model):
    contexts, lengths = [turn.context for turn in TEST], [turn.outcome.output_tokens for turn in TEST]
    ours, theirs = (crps(each.lengths(contexts), lengths) for each in (model, model.statistics))
    assert ours < theirs / 4


def test_durations_that_depend_on_an_argument_are_learnt_better_than_by_statistics(model):
    paused = [turn for turn in TEST if turn.pause is not None and turn.pause_outcome is not None]
    pauses, seconds = [turn.pause for turn in paused], [turn.pause_outcome.duration_s for turn in paused]
    ours, theirs = (crps(each.durations(pauses), seconds) for each in (model, model.statistics))
    assert ours < theirs / 4


def test_what_is_left_shrinks_from_turn_to_turn(model):
    first, last = model.remaining([TEST[0].context, TEST[5].context])
    assert first.turns > 3 and last.turns < 1
    assert first.tokens.mean > 400 and last.tokens.mean < 100


def test_a_bundle_answers_as_the_model_did(model, tmp_path: Path):
    model.save(tmp_path)
    read = TabularModel.load(tmp_path)
    contexts = [turn.context for turn in TEST[:20]]
    for one, other in zip(model.lengths(contexts), read.lengths(contexts), strict=True):
        assert np.array_equal(one.shares, other.shares)


def test_the_same_programs_and_seed_give_the_same_model(model):
    again = TabularModel.fit(TRAIN)
    [one], [other] = (each.lengths([TEST[0].context]) for each in (model, again))
    assert np.allclose(one.shares, other.shares, atol=1e-5)


def test_answers_do_not_depend_on_the_batch(model):
    contexts = [turn.context for turn in TEST[:9]]
    for context, together in zip(contexts, model.lengths(contexts), strict=True):
        assert np.allclose(model.lengths([context])[0].shares, together.shares, atol=1e-6)
    assert model.lengths([]) == model.remaining([]) == model.durations([]) == model.returned([]) == []


def test_what_it_corrects_can_be_statistics_that_go_on_learning(model):
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
def test_nonsense_is_answered_by_distributions(model, text, number, history, seconds):
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


def rewritten(directory: Path, **changes: object) -> None:
    """A bundle that is whole, with another content."""
    read = read_bundle(directory)
    tensors = {
        name: array for name, array in {**read.tensors, **changes.pop("tensors", {})}.items() if array is not None
    }
    write_bundle(directory, replace(read, tensors=tensors, **changes))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"turns.first": None}, r"turns\.first: is missing"),
        ({"pauses.last_bias": np.zeros((3, 4), np.float32)}, r"pauses\.last_bias: has shape \(3, 4\), not"),
        ({"turns.mean": np.full(7, np.nan, np.float32)}, r"turns\.mean: has values that are not finite"),
        ({"turns.first": np.zeros((2, 2), np.float32)}, r"turns\.first: has shape \(2, 2\)"),
        ({"turns.second": np.zeros((3, 4, 4), np.float64)}, r"turns\.second: is of type float64"),
    ],
)
def test_wrong_weights_are_refused_by_name(model, tmp_path: Path, tensors, complaint):
    model.save(tmp_path)
    rewritten(tmp_path, tensors=tensors)
    with pytest.raises(ConfigError, match=complaint):
        TabularModel.load(tmp_path)


def test_a_bundle_for_older_features_or_without_its_statistics_is_refused(model, tmp_path: Path):
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


def test_too_little_to_learn_from_is_said():
    with pytest.raises(ConfigError, match=r"too little to learn from: .* turns"):
        TabularModel.fit(learnable.programs(3))


def test_sources_without_durations_can_be_learnt():
    unrecorded = [
        replace(
            program,
            turns=tuple(replace(t, pause_outcome=t.pause_outcome and PauseOutcome(None, 20)) for t in program.turns),
        )
        for program in TRAIN[:60]
    ]
    model = TabularModel.fit(unrecorded)
    assert model.durations([learnable.pause(random.Random(0), True)])[0].shares.sum() == pytest.approx(1)
