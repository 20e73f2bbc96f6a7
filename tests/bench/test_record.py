"""What a recorded run keeps: the stories of its programs, and the server's memory while it lasts."""

import sys
from pathlib import Path

import pytest

from cluster.bench.record import MemoryLine, PausePart, ProgramLine, Recorded, RunLine, bench_lines, lines_of
from cluster.bench.runner import Silent, run_bench
from cluster.bench.settings import BenchSettings
from cluster.bench.story import Pause, Story
from cluster.bench.workload import Shaping
from cluster.goodput import Outcome, ProgramRecord, Slo, TurnRecord

TOLD = {
    "turns": [
        {"arrived_s": 100.5, "queue_s": 0.25, "decision": "held 2.000s (pays)"},
        {"arrived_s": 105.0, "queue_s": None, "decision": "released"},
    ],
    "events": [
        {"at_s": 100.5, "event": "TurnArrived -> running"},
        {"at_s": 101.0, "event": "TurnEnded(ls) -> deciding"},
        {"at_s": 101.0, "event": "Held(pays) -> held"},
        {"at_s": 101.5, "event": "ToolStarted(ls) -> held"},
        {"at_s": 103.0, "event": "HoldEnded(broken for a waiting turn) -> released"},
        {"at_s": 105.0, "event": "TurnArrived -> running"},
        {"at_s": 106.0, "event": "TurnEnded -> ended"},
    ],
}


def test_a_story_is_read() -> None:
    story = Story.of(TOLD)
    assert story.waits_s == (0.25, None)
    assert story.decisions == ("held 2.000s (pays)", "released")
    # The tool's start changed nothing of the memory: it is one hold.
    assert story.pauses == (
        Pause(101.0, 103.0, "held", "pays"),
        Pause(103.0, 105.0, "released", "broken for a waiting turn"),
    )


@pytest.mark.parametrize(
    "told",
    [None, [], "x", {}, {"turns": 3, "events": {}}, {"turns": [1, None], "events": [1, {"at_s": "x", "event": 4}]}],
)
def test_junk_is_no_story(told: object) -> None:
    assert Story.of(told) == Story()


def test_clocks_are_laid_over_each_other_by_the_fastest_turn() -> None:
    story = Story.of(TOLD)
    assert story.ahead_s([1.5, 5.5]) == 99.0
    assert story.ahead_s([None, 5.5]) == 99.5
    assert story.ahead_s([]) == 0.0


def test_times_count_from_the_start_of_the_run() -> None:
    turns = tuple(
        TurnRecord("p", n, start_s, Outcome.OK, start_s + 0.5, start_s + 1.0, 10, 4, sent_s=start_s)
        for n, start_s in enumerate((21.5, 26.0))
    )
    program = ProgramRecord("p", 21.5, Outcome.OK, turns, 2)
    head = RunLine(0, "caesura", "x", 1.0, 0, (0.0, 9.0), {}, {}, {})
    recorded = Recorded([program], [Story.of(TOLD)], [], start_s=20.0)
    _, line = lines_of(head, recorded, Slo(ttft_s=0.4))
    assert isinstance(line, ProgramLine)
    assert (line.arrival_s, line.good, [turn.start_s for turn in line.turns]) == (1.5, False, [1.5, 6.0])
    # The server's clock is 79 s ahead: its turn came at 100.5, when the client's clock said 21.5.
    assert line.pauses[0] == PausePart(2.0, 4.0, "held", "pays")
    assert line.turns[0].decision == "held 2.000s (pays)"


async def test_a_live_run_is_recorded(cluster_double) -> None:
    settings = BenchSettings(
        url=cluster_double.url,
        policies=("a", "b"),
        rate_per_s=50.0,
        count=3,
        duration_s=None,
        shaping=Shaping(scale_tools=0.001),
        seed=1,
        record=True,
    )
    lines = list(bench_lines(await run_bench(settings, Silent())))
    heads = [line for line in lines if isinstance(line, RunLine)]
    assert [(line.run, line.policy) for line in heads] == [(0, "a"), (1, "b")]
    assert heads[0].versions["caesura"] == "9.9"
    assert heads[0].capacity_tokens == 2 * 100 * 16
    for head in heads:
        programs = [line for line in lines if isinstance(line, ProgramLine) and line.run == head.run]
        assert [round(p.arrival_s, 2) >= 0 for p in programs] == [True] * 3
        assert all(turn.queue_s == 0.25 for program in programs for turn in program.turns)
        memory = [line for line in lines if isinstance(line, MemoryLine) and line.run == head.run]
        assert memory[0].at_s < 1.0
        kinds = {(line.running, line.held, line.cached, line.empty, line.host) for line in memory}
        assert kinds == {(2 * 10 * 16, 2 * 30 * 16, 2 * 25 * 16, 2 * 35 * 16, 14)}


def test_a_record_that_cannot_be_written_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cluster.cli import main

    arguments = ["bench", "--url", "http://127.0.0.1:1", "--record", str(tmp_path / "no" / "run.jsonl")]
    monkeypatch.setattr(sys, "argv", ["caesura", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--record" in capsys.readouterr().err
