import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.core.errors import ConfigError
from predictor_service.bundle import NOTE, data_hash, load_model
from predictor_service.evaluation import check_unseen, scores, trained
from predictor_service.examples import ProgramExample, read_programs, split
from tests.predictor.traces import row, write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """After `look` a turn is short, after `build` long."""
    rows = []
    for number in range(60):
        tools = ["look", "build"] * 3 if number % 2 else ["build", "look"] * 3
        turns = [
            (0, 500 if before == "build" else 20, tool, 2.0, 30)
            for before, tool in zip(["look", *tools], tools, strict=False)
        ]
        rows.append(row(f"p{number}", [(50, 20, "look", 1.0, 30), *turns]))
    return write(tmp_path / "made.jsonl", rows)


@pytest.fixture
def programs(trace: Path) -> list[ProgramExample]:
    return read_programs([trace])


@pytest.mark.parametrize("name", ["statistics", "tabular"])
def test_only_the_train_side_is_learnt_and_the_bundle_says_so(name: str, programs, tmp_path: Path) -> None:
    train, test = split(programs, 4)
    stored = trained(name, programs, 4)
    stored.save(tmp_path / "b")
    read = load_model(tmp_path / "b")
    assert read.name == name
    assert (read.origin.data_sha256, read.origin.programs) == (data_hash(train), len(train))
    assert read.origin.split_seed == 4 and read.origin.sources == ("made",)
    [found] = scores(name, read.model, test)
    told = read.origin.metrics["made"]
    assert told["lengths"]["count"] == sum(len(program.turns) for program in test)
    assert told["lengths"]["mae"] == pytest.approx(found.lengths.mae)
    assert told["durations"]["crps"] == pytest.approx(found.durations.crps)


def test_a_model_that_may_have_seen_the_test_side_is_not_tested(programs) -> None:
    check_unseen(trained("statistics", programs, 4), 4)
    with pytest.raises(ConfigError, match=r"train side of --split-seed 4, but --split-seed is 5"):
        check_unseen(trained("statistics", programs, 4), 5)
    everything = trained("statistics", programs, None)
    assert everything.origin.programs == len(programs) and not everything.origin.metrics
    with pytest.raises(ConfigError, match="on all programs"):
        check_unseen(everything, 0)


def test_unknown_models_are_refused(programs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown predictor 'oracle'; choose one of: statistics"):
        trained("oracle", programs, 0)
    trained("statistics", programs, 0).save(tmp_path)
    note = json.loads((tmp_path / NOTE).read_text())
    (tmp_path / NOTE).write_text(json.dumps({**note, "model": "oracle"}))
    with pytest.raises(ConfigError, match=r"bundle\.json: model: is 'oracle', not one of"):
        load_model(tmp_path)


def test_train_writes_a_bundle_that_evaluate_takes(trace: Path, tmp_path: Path) -> None:
    bundle, about = tmp_path / "bundle", tmp_path / "about.json"
    files = ["--traces", str(trace), "--split-seed", "2"]
    run = CliRunner().invoke(
        app, ["predictor", "train", *files, "--model", "statistics", "--bundle", str(bundle), "--json", str(about)]
    )
    assert run.exit_code == 0, run.output
    assert "made: lengths MAE" in run.output
    assert json.loads(about.read_text())["metrics"]["made"]["lengths"]["count"] > 0
    evaluate = ["predictor", "evaluate", "--models", "statistics", "--bundle", str(bundle), "--traces", str(trace)]
    assert CliRunner().invoke(app, [*evaluate, "--split-seed", "2"]).exit_code == 0
    refused = CliRunner().invoke(app, [*evaluate, "--split-seed", "3"])
    assert isinstance(refused.exception, ConfigError)


def test_a_bundle_that_cannot_be_written_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for bundle in (tmp_path / "file", tmp_path / "file" / "bundle"):
        run = CliRunner().invoke(
            app, ["predictor", "train", "--traces", str(tmp_path / "none.jsonl"), "--bundle", str(bundle)]
        )
        assert isinstance(run.exception, ConfigError)
        assert str(run.exception).startswith("--bundle: ")
