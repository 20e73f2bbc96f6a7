"""What a recorded run keeps: the histories of its programs, and the server's memory while it lasts."""

import json
import sys
from pathlib import Path

import pytest

from cluster.core.lifecycle.events import Held, HoldEnded, PauseReason, ReleaseReason, TurnArrived, TurnEnded
from cluster.core.slo import Outcome, ProgramRecord, Slo, TurnRecord
from cluster.offline.bench.history import Decision, Pause, ProgramHistory
from cluster.offline.bench.record import MemoryLine, PausePart, ProgramLine, Recorded, RunLine, bench_lines, lines_of
from cluster.offline.bench.runner import Silent, run_bench
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Shaping
from replicas.program_table import KvDecision, ProgramTable
from replicas.program_table import TurnRecord as ReplicaTurn

ANSWER = {
    "turns": [
        {"arrived_s": 100.5, "queue_s": 0.25, "kv": "hold", "reason": "pays"},
        {"arrived_s": 105.0, "queue_s": None, "kv": "release", "reason": None},
    ],
    "events": [
        {"at_s": 100.5, "phase": "running", "reason": ""},
        {"at_s": 101.0, "phase": "deciding", "reason": "ls"},
        {"at_s": 101.0, "phase": "held", "reason": "pays"},
        {"at_s": 101.5, "phase": "held", "reason": "ls"},
        {"at_s": 103.0, "phase": "released", "reason": "broken for a waiting turn"},
        {"at_s": 105.0, "phase": "running", "reason": ""},
        {"at_s": 106.0, "phase": "ended", "reason": ""},
    ],
}


def test_a_history_is_read() -> None:
    history = ProgramHistory.of(ANSWER)
    assert history.waits_s == (0.25, None)
    assert history.decisions == (Decision("held", "pays"), Decision("released"))
    # The tool's start changed nothing of the memory: it is one hold.
    assert history.pauses == (
        Pause(101.0, 103.0, "held", "pays"),
        Pause(103.0, 105.0, "released", "broken for a waiting turn"),
    )


def test_what_a_replica_reports_is_read_field_by_field() -> None:
    table = ProgramTable(max_programs=8, idle_s=60.0)
    for event in (TurnArrived(1.0), TurnEnded(2.0, ("ls",), 10), Held(2.0, 9.0, PauseReason.PAYS)):
        table.apply("a", event)
    first = ("a.0", 1.0, 0.25, 0.75, 10, 0, 5, 0, None, ("ls",), "ok")
    table.record("a", ReplicaTurn(*first, decision=KvDecision.HOLD, reason=PauseReason.PAYS, hold_s=7.0))
    for event in (HoldEnded(4.0, ReleaseReason.EXPIRED), TurnArrived(5.0, last=True), TurnEnded(6.0, (), 10)):
        table.apply("a", event)
    table.record("a", ReplicaTurn("a.1", 5.0, 0.0, 1.0, 10, 0, 5, 0, None, (), "ok"))
    history = ProgramHistory.of(json.loads(json.dumps(table.to_public_dict("a"))))
    assert history.decisions == (Decision("held", PauseReason.PAYS), Decision("released"))
    assert history.pauses == (
        Pause(2.0, 4.0, "held", PauseReason.PAYS),
        Pause(4.0, 5.0, "released", ReleaseReason.EXPIRED),
    )
    assert (history.arrivals_s, history.waits_s) == ((1.0, 5.0), (0.25, 0.0))


@pytest.mark.parametrize(
    "answer",
    [None, [], "x", {}, {"turns": 3, "events": {}}, {"turns": [1, None], "events": [1, {"at_s": "x", "event": 4}]}],
)
def test_junk_is_no_history(answer: object) -> None:
    assert ProgramHistory.of(answer) == ProgramHistory()


def test_clocks_are_laid_over_each_other_by_the_fastest_turn() -> None:
    history = ProgramHistory.of(ANSWER)
    assert history.ahead_s([1.5, 5.5]) == 99.0
    assert history.ahead_s([None, 5.5]) == 99.5
    assert history.ahead_s([]) == 0.0


def test_times_count_from_the_start_of_the_run() -> None:
    turns = tuple(
        TurnRecord("p", n, start_s, Outcome.OK, start_s + 0.5, start_s + 1.0, 10, 4, sent_s=start_s)
        for n, start_s in enumerate((21.5, 26.0))
    )
    program = ProgramRecord("p", 21.5, Outcome.OK, turns, 2)
    head = RunLine(0, "caesura", "x", 1.0, 0, (0.0, 9.0), {}, {}, {})
    recorded = Recorded([program], [ProgramHistory.of(ANSWER)], [], start_s=20.0)
    _, line = lines_of(head, recorded, Slo(ttft_s=0.4))
    assert isinstance(line, ProgramLine)
    assert (line.arrival_s, line.good, [turn.start_s for turn in line.turns]) == (1.5, False, [1.5, 6.0])
    # The server's clock is 79 s ahead: its turn came at 100.5, when the client's clock said 21.5.
    assert line.pauses[0] == PausePart(2.0, 4.0, "held", "pays")
    assert (line.turns[0].decision, line.turns[0].reason) == ("held", "pays")


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


def test_a_record_that_cannot_be_written_is_reported_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cluster.cli import main

    arguments = ["bench", "--url", "http://127.0.0.1:1", "--record", str(tmp_path / "no" / "run.jsonl")]
    monkeypatch.setattr(sys, "argv", ["caesura", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--record" in capsys.readouterr().err
