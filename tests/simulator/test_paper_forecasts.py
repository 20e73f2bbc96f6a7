"""The papers' predictors from a trace with texts to a simulation: train, forecast what was held out, simulate.

The bases are tiny and have random weights, so no accuracy is claimed.
"""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.core.errors import ConfigError
from cluster.offline.simulator.foresight import forecasts_of
from predictor_service.bundle import load_model
from predictor_service.examples import ProgramExample, in_test, read_programs
from predictor_service.forecast_files import read_forecasts
from tests.predictor.tiny_bases import write_bert, write_opt
from tests.predictor.traces import row, write

WORDS = ["find", "book", "cancel", "flight", "hotel", "the", "a", "please"]
PROGRAMS = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace with texts: a turn whose text says `book` is long, and its call slow."""
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(0)
    rows, texts = [], []
    for number in range(PROGRAMS):
        turns = []
        for turn in range(4):
            words = rng.choices(WORDS, k=6)
            long = "book" in words
            turns.append((20, 300 if long else 12, "api", rng.uniform(4, 5) if long else rng.uniform(0.1, 0.3), 10))
            texts.append({"program_id": f"p{number}", "turn": turn, "prompt_text": " ".join(words), "output_text": ""})
        rows.append(row(f"p{number}", turns))
    return {
        "trace": write(folder / "made.jsonl", rows),
        "text": write(folder / "text.jsonl", texts),
        "lamps": write_opt(folder / "opt", WORDS),
        "augserve": write_bert(folder / "bert", WORDS),
    }


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def simulated(files: dict[str, Path], forecasts: Path, out: Path) -> dict[str, dict[str, Any]]:
    short = ["--minutes", 0.25, "--warmup", 0, "--rates", 4, "--max-seqs", 4, "--quiet"]  # turns have to wait
    command = ["simulate", "--policies", "lamps,augserve", "--no-oracle", "--trace", files["trace"], *short]
    run(*command, "--forecasts", forecasts, "--json", out)
    return {line["policy"]: line for line in map(json.loads, out.read_text().splitlines())}


@pytest.mark.parametrize(("model", "test_share"), [("lamps", 0.2), ("augserve", 0.3)])
def test_what_was_held_out_is_simulated_with_the_forecasts_of_a_papers_predictor(
    model: str, test_share: float, files: dict[str, Path], tmp_path: Path
) -> None:
    read = ["--traces", files["trace"], "--text", files["text"]]
    bundle, out = tmp_path / "bundle", tmp_path / "forecasts.jsonl"
    trained = run("predictor", "train", "--model", model, "--base", files[model], *read, "--bundle", bundle)
    assert "Acc-5" in trained and "Acc-15" in trained and "MAE" in trained
    evaluated = run("predictor", "evaluate", "--models", model, "--bundle", bundle, *read)
    measures = evaluated.partition("The papers' measures:")[2].split("\n\n")[1].splitlines()
    assert measures[0] == "| source | model | turns | Acc-5 | Acc-15 | MAE | bins off | accuracy | MSE of seconds |"
    [ours] = [line for line in measures if f"| {model} |" in line]
    assert ours.endswith("| - |") == (model == "lamps")

    run("predictor", "forecast", "--bundle", bundle, *read, "--out", out)
    forecasts = read_forecasts(out)
    held_out = {f"p{n}" for n in range(PROGRAMS) if in_test(f"group of p{n}", 0, test_share)}
    assert set(forecasts) == held_out and 0 < len(held_out) < PROGRAMS
    [program, *_] = forecasts
    contexts = [turn.context for turn in _programs(files)[program].turns]
    for forecast, length in zip(forecasts[program], load_model(bundle).model.lengths(contexts), strict=True):
        assert forecast.output_tokens == pytest.approx(length.mean, rel=1e-3)

    results = simulated(files, out, tmp_path / "runs.jsonl")
    assert set(results) == {"lamps", "augserve"}
    assert all(not line["simulation"]["oracle"] and line["completed"] > 0 for line in results.values())
    # Other forecasts give other schedules, so the policies use them.
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line in lines:
        for turn in line["turns"]:
            turn["output_tokens"] = 500.0 if turn["output_tokens"] < 100 else 5.0
            turn["tools"] = [{**tool, "pause_s": 30.0 if tool["pause_s"] < 2 else 0.01} for tool in turn["tools"]]
    others = simulated(files, write(tmp_path / "others.jsonl", lines), tmp_path / "other_runs.jsonl")
    for policy, result in results.items():
        assert others[policy]["simulation"]["jct_all_s"] != result["simulation"]["jct_all_s"], policy


def _programs(files: dict[str, Path]) -> dict[str, ProgramExample]:
    return {one.program_id: one for one in read_programs([files["trace"]], [files["text"]])}


def test_files_that_do_not_fit_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    made = forecasts_of(files["trace"], "statistics")
    rows = [{"program_id": name, "turns": [dataclasses.asdict(turn) for turn in turns]} for name, turns in made.items()]
    command = ["simulate", "--policies", "lamps", "--trace", files["trace"], "--minutes", 0.1, "--forecasts"]
    for number, (changed, message) in enumerate(
        (
            ([{**rows[0], "turns": rows[0]["turns"][:2]}], r"--forecasts: p\d+ has 4 turns in the trace, not 2"),
            ([{**rows[0], "program_id": "other"}], "a forecast for none of the trace's programs"),
            ([{**rows[0], "turns": [{**rows[0]["turns"][0], "output_tokens": -1.0}]}], ":1: a number is negative"),
            ([{"program_id": "p0"}], ":1: .*turns"),
            ([rows[0], rows[0]], r":2: program_id: 'p\d+' is on an earlier line"),
        )
    ):
        with pytest.raises(ConfigError, match=message):
            run(*command, write(tmp_path / f"{number}.jsonl", changed))
    with pytest.raises(ConfigError, match="--forecasts: lamps has to be trained"):
        run(*command, "lamps")


def test_a_bundle_that_has_seen_the_programs_forecasts_none(files: dict[str, Path], tmp_path: Path) -> None:
    read = ["--traces", files["trace"], "--bundle", tmp_path]
    run("predictor", "train", "--model", "statistics", "--all", *read)
    with pytest.raises(ConfigError, match="trained on all programs: none is left"):
        run("predictor", "forecast", *read, "--out", tmp_path / "f.jsonl")
    run("predictor", "train", "--model", "statistics", "--test-share", 0.2, *read)
    with pytest.raises(ConfigError, match=r"--test-share 0\.3: .* with 0\.2"):
        run("predictor", "evaluate", "--models", "statistics", *read, "--test-share", 0.3)
    run("predictor", "evaluate", "--models", "statistics", *read)
