from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import ConfigError
from predictor_service.bundle import Origin, read_bundle, write_bundle
from predictor_service.context import TurnContext
from predictor_service.encoder import EncoderModel, EncoderSettings
from predictor_service.model_files import StoredModel, load_model, save_model
from predictor_service.statistics_model import StatisticsModel
from tests.predictor import learnable

TRAIN = learnable.programs(120)
TEST = [turn for program in learnable.programs(20, seed=1) for turn in program.turns]
CONTEXTS = [turn.context for turn in TEST]
ORIGIN = Origin("0" * 64, 120, ("made",), 0)
SETTINGS = EncoderSettings(max_tokens=48)


@pytest.fixture(scope="module")
def model() -> EncoderModel:
    return EncoderModel.fit(TRAIN, SETTINGS)


@pytest.fixture(scope="module")
def encoder(model, tmp_path_factory) -> Path:
    """As one that was downloaded: weights, config and tokenizer."""
    directory = tmp_path_factory.mktemp("encoder")
    model.network.encoder.save_pretrained(directory)
    model.tokenizer.save_pretrained(directory)
    return directory


def crps(model) -> float:
    lengths = [turn.outcome.output_tokens for turn in TEST]
    return float(np.mean([answer.crps(value) for answer, value in zip(model.lengths(CONTEXTS), lengths, strict=True)]))


def test_it_reads_the_word_that_tells_the_length(model):
    assert crps(model) < crps(StatisticsModel.fit(TRAIN)) / 2


@pytest.mark.parametrize(("pooling", "tune"), [("mean", False), ("last", True)])
def test_an_encoder_that_is_there_is_used_as_it_is_or_tuned(model, encoder, pooling, tune):
    ours = EncoderModel.fit(TRAIN, replace(SETTINGS, path=str(encoder), pooling=pooling, tune=tune))
    assert crps(ours) < crps(StatisticsModel.fit(TRAIN))
    before, after = (each.network.encoder.state_dict() for each in (model, ours))
    same = all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)
    assert same is not tune


def test_a_bundle_answers_as_the_model_did_and_needs_nothing_else(model, tmp_path):
    save_model(tmp_path, StoredModel("encoder", model, ORIGIN))
    read = load_model(tmp_path)
    assert read.name == "encoder" and read.origin == ORIGIN and read.model.settings == SETTINGS
    for one, other in zip(model.lengths(CONTEXTS[:5]), read.model.lengths(CONTEXTS[:5]), strict=True):
        assert np.allclose(one.shares, other.shares, atol=1e-6)


def test_texts_of_all_kinds_are_answered(model):
    texts = ["", "\ud800 alone", "x" * 1_000_000, "\x00", " ".join(learnable.WORDS)]
    turns = [TurnContext(text=text) for text in texts]
    for answer, left in zip(model.lengths(turns), model.remaining(turns), strict=True):
        assert answer.shares.sum() == pytest.approx(1) and left.turns >= 0
    # Those beside it in a batch change nothing.
    assert np.allclose(model.lengths(turns)[0].shares, model.lengths(turns[:1])[0].shares, atol=1e-5)
    assert model.lengths([]) == []


def test_a_place_without_an_encoder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}: no encoder"):
        EncoderModel.fit(TRAIN, EncoderSettings(path=str(tmp_path)))


def test_weights_that_are_not_numbers_and_settings_that_are_not_are_refused(model, tmp_path):
    model.save(tmp_path)
    read = read_bundle(tmp_path)
    name = "heads.2.bias"
    write_bundle(tmp_path, replace(read, tensors={**read.tensors, name: np.full_like(read.tensors[name], np.nan)}))
    with pytest.raises(ConfigError, match=rf"{name}: has values that are not finite"):
        EncoderModel.load(tmp_path)
    write_bundle(tmp_path, replace(read, tensors={key: a for key, a in read.tensors.items() if key != name}))
    with pytest.raises(ConfigError, match=name):
        EncoderModel.load(tmp_path)
    write_bundle(tmp_path, replace(read, settings={**read.settings, "pooling": "first"}))
    with pytest.raises(ConfigError, match=r"settings: [^$]*pooling"):
        EncoderModel.load(tmp_path)


def test_too_little_to_learn_from_is_said():
    with pytest.raises(ConfigError, match="too little to learn from"):
        EncoderModel.fit(learnable.programs(2))
