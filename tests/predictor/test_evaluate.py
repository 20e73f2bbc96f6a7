import json
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.offline.commands._common import repeated
from predictor_service.evaluation import ONLINE, PER_TOOL_MEAN, evaluated
from predictor_service.examples import ProgramExample, read_programs, split
from predictor_service.scores import MEAN, PER_TOOL_EXPONENTIAL, SourceScores, json_lines, tables
from tests.predictor.traces import DATA, needs_data, row, write


def made(tmp_path: Path, source: str, programs: int, busy: bool = True) -> Path:
    """`look` is quick and followed by a short turn, `build` slow and followed by a long one."""
    rng = random.Random(source)

    def turn(last: str) -> tuple[int, int, str, float | None, int]:
        tool = rng.choice(["look:ls", "build:make"])
        output = rng.randint(300, 400) if last == "build:make" else rng.randint(11, 20)
        seconds = rng.uniform(50, 60) if tool == "build:make" else rng.uniform(0.1, 0.2)
        return 0, output, tool, seconds if busy else None, 25

    rows = []
    for number in range(programs):
        turns = [(100, 15, "look:ls", 0.1 if busy else None, 25)]
        for _ in range(rng.randint(3, 8)):
            turns.append(turn(turns[-1][2]))
        rows.append(row(f"{source}{number}", turns, source=source))
    return write(tmp_path / f"{source}.jsonl", rows)


@pytest.fixture
def programs(tmp_path: Path) -> list[ProgramExample]:
    return read_programs([made(tmp_path, "one", 60), made(tmp_path, "two", 40, busy=False)])


def of(found: list[SourceScores], model: str, source: str) -> Any:
    return next(each for each in found if (each.model, each.source) == (model, source))


def test_statistics_are_better_than_baselines_where_the_last_call_tells(programs: list[ProgramExample]) -> None:
    found = evaluated(programs, 0, ["statistics"])
    for source in ("one", "two"):
        ours, mean = of(found, "statistics", source), of(found, PER_TOOL_MEAN, source)
        assert ours.lengths.crps < mean.lengths.crps
        assert ours.lengths.rank_correlation > 0.6
    assert of(found, "statistics", "one").durations.crps < of(found, PER_TOOL_EXPONENTIAL, "one").durations.crps / 2
    assert of(found, "statistics", "two").durations is None, "none was recorded"
    assert of(found, "statistics", "two").returned is not None


def test_only_the_test_side_is_asked_and_only_one_row_learns_from_it(programs: list[ProgramExample]) -> None:
    _, test = split(programs, 3)
    turns = sum(len(program.turns) for program in test if program.source == "one")
    found = evaluated(programs, 3, ["statistics"])
    assert {of(found, name, "one").lengths.count for name in (PER_TOOL_MEAN, "statistics")} == {turns}
    again = evaluated([*programs[:1], *reversed(programs[1:])], 3, ["statistics"])
    assert of(again, "statistics", "one").lengths.crps == pytest.approx(of(found, "statistics", "one").lengths.crps)
    assert of(found, "statistics" + ONLINE, "one").lengths != of(found, "statistics", "one").lengths


def test_the_tables_have_each_model_on_each_source_and_the_mean(programs: list[ProgramExample]) -> None:
    found = evaluated(programs, 0, ["statistics"])
    text = tables(found)
    lengths = text.split("\n\n")[1].splitlines()
    assert [line.split(" | ")[:2] for line in lengths[2:]] == [
        [f"| {source}", model]
        for source in ("one", "two", MEAN)
        for model in (PER_TOOL_MEAN, PER_TOOL_EXPONENTIAL, "statistics", "statistics" + ONLINE)
    ]
    durations = text.split("\n\n")[5].splitlines()
    assert f"| one | {PER_TOOL_EXPONENTIAL} |" in text
    assert durations[3].split(" | ")[5] == "1.000", "the exponential is as good as itself"
    lines = [json.loads(line) for line in json_lines(found, {"command": "c"}).splitlines()]
    assert len(lines) == 8
    assert lines[0]["command"] == "c"


def test_a_split_that_leaves_a_side_empty_is_refused(programs: list[ProgramExample]) -> None:
    with pytest.raises(ConfigError, match="--split-seed 0: of 1 programs"):
        evaluated(programs[:1], 0, ["statistics"])
    with pytest.raises(ConfigError, match="unknown predictor 'guess'"):
        evaluated(programs, 0, ["guess"])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--traces a b --text c", "--traces a --traces b --text c"),
        ("--traces a --traces b c --split-seed 3", "--traces a --traces b --traces c --split-seed 3"),
        ("--split-seed 3 x --json o", "--split-seed 3 x --json o"),
        ("--traces --text a", "--traces --text a"),
    ],
)
def test_an_option_takes_all_files_up_to_the_next(given: str, read: str) -> None:
    assert repeated(given.split()) == read.split()


@needs_data
def test_recorded_durations_are_forecast_much_better_than_by_exponentials() -> None:
    programs = read_programs([DATA / "programs" / "iso_bench_trae.jsonl.gz"])
    found = evaluated(programs, 0, ["statistics"])
    ours = of(found, "statistics", "iso_bench_trae").durations
    assert ours.crps < 0.75 * of(found, PER_TOOL_EXPONENTIAL, "iso_bench_trae").durations.crps
    assert 0.86 <= ours.coverage <= 0.94
