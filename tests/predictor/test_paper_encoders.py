"""The papers' predictors on tiny bases with random weights: what they compute, not how accurate the papers' are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from cluster.core.errors import ConfigError
from predictor_service import paper_encoders
from predictor_service.bundle import Origin, StoredModel, load_model, read_bundle, write_bundle
from predictor_service.call_times import CallTimes
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution
from predictor_service.evaluation import PerToolMean, evaluated, trained
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.model import TurnContext
from predictor_service.paper_encoders import AugserveModel, LampsModel
from predictor_service.predictor import Predictor
from predictor_service.scores import paper_scores
from predictor_service.statistics_model import StatisticsModel
from tests.predictor import learnable
from tests.predictor.tiny_bases import write_bert, write_opt


def of_papers(programs: list[ProgramExample]) -> list[ProgramExample]:
    """Lengths that the bins can hold, and calls that are slow after prompts that ask for a report."""

    def changed(turn: TurnExample) -> TurnExample:
        long = learnable.LONG in turn.context.text
        outcome = replace(turn.outcome, output_tokens=405 if long else 15)
        if turn.pause is None or turn.pause_outcome is None:
            return replace(turn, outcome=outcome)
        pause = replace(turn.pause, turn=turn.context)
        return replace(
            turn,
            outcome=outcome,
            pause=pause,
            pause_outcome=replace(turn.pause_outcome, duration_s=30.0 if long else 2.0),
        )

    return [replace(program, turns=tuple(map(changed, program.turns))) for program in programs]


TRAIN = of_papers(learnable.programs(120))
TEST = [turn for program in of_papers(learnable.programs(20, seed=1)) for turn in program.turns]
CONTEXTS = [turn.context for turn in TEST]
WORDS = {word for turn in CONTEXTS for word in turn.text.split()}


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_opt(tmp_path_factory.mktemp("opt"), WORDS)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Random weights have further to go than pretrained ones.
        patch.setattr(paper_encoders, "BASE_LEARNING_RATE", 3e-3)
        patch.setattr(paper_encoders, "HEAD_LEARNING_RATE", 1e-2)
        yield


@pytest.fixture(scope="module")
def lamps(opt: Path, quick: None) -> LampsModel:
    return LampsModel.fit(TRAIN, opt)


@pytest.fixture(scope="module")
def augserve(bert: Path, quick: None) -> AugserveModel:
    return AugserveModel.fit(TRAIN, bert)


def test_lamps_trains_a_linear_layer_on_the_last_tokens_embedding_and_nothing_else(
    lamps: LampsModel, opt: Path
) -> None:
    base = AutoModel.from_pretrained(opt)
    for name, weight in base.state_dict().items():
        assert torch.equal(weight, lamps.network.base.state_dict()[name]), name
    context = next(turn for turn in CONTEXTS if len(turn.text.split()) > 5)
    ids = lamps.tokenizer(context.text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        last = base.eval()(input_ids=ids).last_hidden_state[0, -1]
        shares = torch.softmax(lamps.network.head(last), dim=0).double().numpy()
    assert shares.shape == (50,)
    # In a batch with longer texts, the last token is still the text's own.
    found = lamps.lengths(CONTEXTS)[CONTEXTS.index(context)]
    assert np.allclose(found.shares[:50], shares, atol=1e-5)
    assert not found.shares[50:].any()
    assert found.mean == pytest.approx(float(shares @ (np.arange(50) * 10.0 + 5.0)), rel=1e-4), "by bin"


def test_lamps_reads_2048_tokens_and_the_last_ones(lamps: LampsModel) -> None:
    assert lamps.tokenizer.model_max_length == 2048
    end = " ".join(["alpha"] * 2100)
    same = lamps.lengths([TurnContext(text=f"bravo {end}"), TurnContext(text=f"golf {end}")])
    assert np.allclose(same[0].shares, same[1].shares)
    ends = lamps.lengths([TurnContext(text=f"{end} bravo"), TurnContext(text=f"{end} golf")])
    assert np.abs(ends[0].shares - ends[1].shares).max() > 0.01
    start = " ".join(["alpha"] * 1900)
    other = lamps.lengths([TurnContext(text=f"bravo {start}"), TurnContext(text=f"golf {start}")])
    assert not np.array_equal(other[0].shares, other[1].shares)


def test_both_learn_lengths_from_the_text(lamps: LampsModel, augserve: AugserveModel) -> None:
    lengths = [turn.outcome.output_tokens for turn in TEST]
    for model, at_most in ((lamps, 0.9), (augserve, 0.2)):
        errors = [one.crps(value) for one, value in zip(model.lengths(CONTEXTS), lengths, strict=True)]
        statistics = [one.crps(v) for one, v in zip(StatisticsModel.fit(TRAIN).lengths(CONTEXTS), lengths, strict=True)]
        assert np.mean(errors) < at_most * np.mean(statistics), model.NAME


def test_a_length_beyond_the_bins_belongs_to_the_last_one(opt: Path, quick: None) -> None:
    long = [
        replace(p, turns=tuple(replace(t, outcome=replace(t.outcome, output_tokens=3000)) for t in p.turns))
        for p in TRAIN[:40]
    ]
    [found] = LampsModel.fit(long, opt).lengths(CONTEXTS[:1])
    assert found.mean == pytest.approx(495, abs=10)


def test_augserve_regresses_the_duration_from_the_prompt(augserve: AugserveModel) -> None:
    pauses = [turn.pause for turn in TEST if turn.pause is not None]
    found = augserve.durations(pauses)
    for pause, duration in zip(pauses, found, strict=True):
        wanted = 30.0 if learnable.LONG in pause.turn.text else 2.0
        assert duration.mean == pytest.approx(wanted, abs=6.0)
    assert augserve.times is not None and augserve.times.of("bash:make")[0] == pytest.approx(16, abs=2)


def test_an_unknown_tool_has_the_durations_of_all_calls_and_few_calls_no_row() -> None:
    times = CallTimes.observed(TRAIN)
    assert times is not None
    assert times.of("never") == times.of("bash:other") == times.of("bash:make")
    few = CallTimes.observed([replace(TRAIN[0], turns=TRAIN[0].turns[:2])])
    assert few is not None and set(few.by_tool) == {""}
    with pytest.raises(ValueError, match="durations by tool"):
        CallTimes({"bash": (1.0, 1.0)})


@pytest.mark.parametrize("name", ["lamps", "augserve"])
def test_a_bundle_answers_as_the_model_did(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(name)
    origin = Origin("0" * 64, 120, ("made",), 0, model.TEST_SHARE)
    StoredModel(name, model, origin).save(tmp_path)
    read = load_model(tmp_path)
    assert (read.name, read.origin) == (name, origin)
    for one, other in zip(model.lengths(CONTEXTS[:5]), read.model.lengths(CONTEXTS[:5]), strict=True):
        assert np.allclose(one.shares, other.shares, atol=1e-6)
    assert read.model.tokenizer.model_max_length == model.tokenizer.model_max_length
    bundle = read_bundle(tmp_path)
    write_bundle(tmp_path, replace(bundle, tensors={k: v for k, v in bundle.tensors.items() if k != "head.bias"}))
    with pytest.raises(ConfigError, match=r"head\.bias"):
        load_model(tmp_path)


def test_a_bundle_of_augserve_without_durations_is_refused(augserve: AugserveModel, tmp_path: Path) -> None:
    augserve.save(tmp_path)
    whole = read_bundle(tmp_path)
    for times, place in ((None, ""), ([1.0], ""), ({"": [1.0]}, r"\.\.1"), ({"": [1.0, None]}, r"\.\.1")):
        write_bundle(tmp_path, replace(whole, settings={"call_times": times}))
        with pytest.raises(ConfigError, match=rf"^{tmp_path}: settings\.call_times{place}: "):
            AugserveModel.load(tmp_path)


def test_statistics_predict_what_the_papers_do_not(augserve: AugserveModel) -> None:
    statistics = StatisticsModel.fit(TRAIN)
    [found] = Predictor(statistics, augserve, augserve).predict(CONTEXTS[:1])
    [own] = Predictor(statistics).predict(CONTEXTS[:1])
    assert (found.later_tokens, found.later_turns) == (own.later_tokens, own.later_turns)
    assert found.tools[0].returned_tokens == own.tools[0].returned_tokens
    assert found.output_tokens != own.output_tokens and found.tools[0].pause_s != own.tools[0].pause_s


def test_texts_of_all_kinds_are_answered(lamps: LampsModel, augserve: AugserveModel) -> None:
    turns = [TurnContext(text=text) for text in ("", "\ud800 alone", "x" * 100_000, "\x00", " ".join(learnable.WORDS))]
    for model in (lamps, augserve):
        answers = model.lengths(turns)
        assert all(one.shares.sum() == pytest.approx(1) and len(one.shares) == len(LENGTH_EDGES) - 1 for one in answers)
        # The other texts of a batch change nothing, and an answer that is kept is the same.
        assert np.allclose(answers[0].shares, model.lengths(turns[:1])[0].shares, atol=1e-5)
        assert model.lengths([]) == []


def test_bases_that_cannot_be_used_are_named_by_the_option(opt: Path, bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--base {bert}: is of the type 'bert', but the model lamps reads a causal"):
        LampsModel.fit(TRAIN, bert)
    with pytest.raises(ConfigError, match=rf"--base {opt}: is of the type 'opt', but the model augserve .* encoder"):
        AugserveModel.fit(TRAIN, opt)
    with pytest.raises(ConfigError, match=rf"--base {tmp_path}: has no config.json"):
        LampsModel.fit(TRAIN, tmp_path)
    for file in opt.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=rf"--base {tmp_path}: has no tokenizer"):
        LampsModel.fit(TRAIN, tmp_path)
    with pytest.raises(ConfigError, match="--base: the model lamps needs a directory"):
        trained("lamps", TRAIN, 0)


def test_augserve_needs_durations(bert: Path) -> None:
    silent = [replace(p, turns=tuple(replace(t, pause_outcome=None) for t in p.turns)) for p in TRAIN]
    with pytest.raises(ConfigError, match="--traces: no duration"):
        AugserveModel.fit(silent, bert)


def test_the_papers_measures_by_hand() -> None:
    def of(length: float) -> Distribution:
        return Distribution.of_counts(LENGTH_EDGES, 1.0 * (np.arange(len(LENGTH_EDGES) - 1) == (length - 5) // 10))

    # Forecast as 15, 25, 45 and 495: errors of 4, 9, 21 and 505 tokens, and of 0, 1, 2 and 0 bins.
    lengths = [of(15), of(25), of(45), of(495)]
    durations = [Distribution.of_mean(DURATION_EDGES, seconds) for seconds in (2.0, 7.5)]
    found = paper_scores((lengths, [11, 34, 24, 1000]), (durations, [3.0, 7.0]))
    assert found is not None
    assert (found.acc_5, found.acc_15, found.accuracy) == (0.25, 0.5, 0.5)
    assert (found.mae, found.bins_off) == (pytest.approx((4 + 9 + 21 + 505) / 4), pytest.approx(0.75))
    assert found.mse_s2 == pytest.approx((1.0 + 0.25) / 2)
    assert paper_scores(([], []), ([], [])) is None


def test_evaluate_has_the_papers_measures_of_both(lamps: LampsModel, augserve: AugserveModel) -> None:
    programs = of_papers(learnable.programs(60, seed=2))
    found = {s.model: s for s in evaluated(programs, 0, ["lamps", "augserve"], {"lamps": lamps, "augserve": augserve})}
    assert found["lamps"].papers is not None and found["lamps"].papers.mse_s2 is None
    assert found["lamps"].remaining is None and found["augserve"].returned is None
    ours, mean = found["augserve"].papers, found["per-tool mean"].papers
    assert ours is not None and mean is not None
    assert ours.acc_5 == ours.accuracy > 0.95, "each length is the middle of its bin"
    assert ours.mse_s2 < mean.mse_s2 / 10
    assert PerToolMean.fit(programs).lengths(CONTEXTS[:1])[0].mean > 15
