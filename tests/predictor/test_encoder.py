import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core.errors import ConfigError
from predictor_service import encoder, fine_tuning
from predictor_service.bundle import Origin, StoredModel, load_model, read_bundle, write_bundle
from predictor_service.encoder import EncoderModel
from predictor_service.fine_tuning import train_passes
from predictor_service.model import TurnContext
from predictor_service.statistics_model import StatisticsModel
from tests.predictor import learnable
from tests.predictor.tiny_bases import write_bert

TRAIN = learnable.programs(120)
TEST = [turn for program in learnable.programs(20, seed=1) for turn in program.turns]
CONTEXTS = [turn.context for turn in TEST]
ORIGIN = Origin("0" * 64, 120, ("made",), 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("base"), {word for turn in CONTEXTS for word in turn.text.split()})


@pytest.fixture(scope="module")
def model(base: Path) -> Iterator[EncoderModel]:
    with pytest.MonkeyPatch.context() as patch:
        # Random weights have further to go than pretrained ones.
        patch.setattr(encoder, "BASE_LEARNING_RATE", 3e-3)
        patch.setattr(encoder, "HEAD_LEARNING_RATE", 3e-3)
        yield EncoderModel.fit(TRAIN, base)


def test_it_reads_the_word_that_decides_the_length(model: EncoderModel) -> None:
    lengths = [turn.outcome.output_tokens for turn in TEST]

    def crps(asked: EncoderModel | StatisticsModel) -> float:
        return float(np.mean([one.crps(value) for one, value in zip(asked.lengths(CONTEXTS), lengths, strict=True)]))

    assert crps(model) < crps(StatisticsModel.fit(TRAIN)) / 2


def test_a_bundle_answers_as_the_model_did_and_needs_nothing_else(model: EncoderModel, tmp_path: Path) -> None:
    StoredModel("encoder", model, ORIGIN).save(tmp_path)
    read = load_model(tmp_path)
    assert read.name == "encoder" and read.origin == ORIGIN
    for one, other in zip(model.lengths(CONTEXTS[:5]), read.model.lengths(CONTEXTS[:5]), strict=True):
        assert np.allclose(one.shares, other.shares, atol=1e-6)


def test_texts_of_all_kinds_are_answered(model: EncoderModel) -> None:
    texts = ["", "\ud800 alone", "x" * 1_000_000, "\x00", " ".join(learnable.WORDS)]
    turns = [TurnContext(text=text) for text in texts]
    for answer, left in zip(model.lengths(turns), model.remaining(turns), strict=True):
        assert answer.shares.sum() == pytest.approx(1) and left.turns >= 0
    # The other texts of a batch change nothing.
    assert np.allclose(model.lengths(turns)[0].shares, model.lengths(turns[:1])[0].shares, atol=1e-5)
    assert model.lengths([]) == []


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--base {tmp_path}: has no config.json"):
        EncoderModel.fit(TRAIN, tmp_path)


def test_weights_that_are_not_safetensors_are_not_read(base: Path, tmp_path: Path) -> None:
    for file in base.iterdir():
        name = "pytorch_model.bin" if file.name == "model.safetensors" else file.name
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=f"--base {tmp_path}: has no weights in safetensors"):
        EncoderModel.fit(TRAIN, tmp_path)


def test_weights_that_are_not_numbers_or_missing_are_rejected(model: EncoderModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    read = read_bundle(tmp_path)
    name = "classifier.bias"
    write_bundle(tmp_path, replace(read, tensors={**read.tensors, name: np.full_like(read.tensors[name], np.nan)}))
    with pytest.raises(ConfigError, match=rf"{name}: has values that are not finite"):
        EncoderModel.load(tmp_path)
    write_bundle(tmp_path, replace(read, tensors={key: a for key, a in read.tensors.items() if key != name}))
    with pytest.raises(ConfigError, match=name):
        EncoderModel.load(tmp_path)


def test_too_little_to_learn_from_is_an_error(base: Path) -> None:
    with pytest.raises(ConfigError, match="too little to learn from"):
        EncoderModel.fit(learnable.programs(2), base)


@pytest.mark.parametrize("losses", [(math.nan,), (math.inf,), (math.nan, 1.0, 2.0)])
def test_the_best_pass_is_one_with_a_finite_loss(losses: tuple[float, ...]) -> None:
    network, number = torch.nn.Linear(1, 1), itertools.count()

    def held_out(rows: Sequence[int]) -> float:
        return losses[min(next(number), len(losses) - 1)]

    def train(rows: Sequence[int]) -> torch.Tensor:
        return network(torch.ones(1)).sum()  # type: ignore[no-any-return]

    groups = [{"params": list(network.parameters()), "lr": 0.1}]
    with pytest.raises(ConfigError, match="no pass has a finite loss") if len(losses) == 1 else nullcontext():
        train_passes(network, groups, (train, held_out), (fine_tuning.BATCH, 1), np.random.default_rng(0))
        assert all(not weight.requires_grad for weight in network.parameters())
