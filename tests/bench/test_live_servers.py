"""Servers that benchmarks compare: how they start and end, and what is measured of any of them."""

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks import live_routers, peer_routers, served
from benchmarks.gpu_kit import live
from benchmarks.live_against_simulated import compared
from benchmarks.live_routers import Ran, Subject, measures_of
from benchmarks.served import foreign_server
from cluster.core.slo import Outcome, ProgramRecord, TurnRecord
from cluster.local.ports import free_ports
from cluster.offline.bench.results import BenchResult, BlockResult
from cluster.offline.bench.settings import AS_SERVED, BenchSettings
from cluster.offline.bench.workload import Workload

IGNORES_SIGTERM = """
import signal
from http.server import SimpleHTTPRequestHandler, test
signal.signal(signal.SIGTERM, signal.SIG_IGN)
test(SimpleHTTPRequestHandler, port={}, bind="127.0.0.1")
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_server_is_used_once_it_answers_and_has_ended_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(served, "STOP_WITHIN_S", 0.2 if stubborn else 60.0)
    (tmp_path / "health").touch()
    (port,) = free_ports(1, "127.0.0.1")
    plain = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    command = [sys.executable, "-c", IGNORES_SIGTERM.format(port)] if stubborn else plain
    with foreign_server(command, f"http://127.0.0.1:{port}", {"MARK": "seen"}) as pid:
        assert psutil.Process(pid).environ()["MARK"] == "seen"
    assert not psutil.pid_exists(pid)


def test_a_server_that_ends_is_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match=r"-c raise SystemExit\(3\) did not start"),
        foreign_server([sys.executable, "-c", "raise SystemExit(3)"], "http://127.0.0.1:1", {}),
    ):
        raise AssertionError("not reached")


def turn(index: int, known: int = 0, cached: int | None = None, outcome: Outcome = Outcome.OK) -> TurnRecord:
    return TurnRecord(
        "p", index, 20.0, outcome, 20.5, 21.0, 100, 5, previous_context_tokens=known, cached_tokens=cached
    )


def program(*turns: TurnRecord) -> ProgramRecord:
    return ProgramRecord("p", 20.0, turns[-1].outcome, turns, len(turns))


def replay(warmup: tuple[ProgramRecord, ...], *measured: ProgramRecord) -> BenchResult:
    settings = BenchSettings(url="http://localhost", warmup_s=10.0, duration_s=30.0)
    return BenchResult(settings, "tiny", Workload("w", ()), (BlockResult(AS_SERVED, 0, warmup, measured),))


def test_hits_are_of_what_later_turns_knew_and_all_turns_count() -> None:
    warm = program(turn(0), turn(1, known=100, cached=130))
    cut = program(turn(0), turn(1, known=300, cached=100), turn(2, known=600, cached=0, outcome=Outcome.FAILED))
    full = program(turn(0, outcome=Outcome.REJECTED))
    found = measures_of(replay((warm,), cut, full))
    assert found["hit_rate"] == (100 + 100) / (100 + 300), "no more than was known, and of turns that ended well"
    assert (found["offered"], found["completed"]) == (2, 0)
    assert (found["failed_turns"], found["rejected_turns"]) == (1, 1)
    assert measures_of(replay((), program(turn(0))))["hit_rate"] is None


def test_programs_that_have_not_ended_count_with_their_time_so_far() -> None:
    """The first one ends after 1 s. The second still waits for its first token 9 s after it arrived."""
    waits = replace(turn(0, outcome=Outcome.UNFINISHED), first_token_s=None, last_token_s=None)
    refused = replace(turn(0, outcome=Outcome.REJECTED), first_token_s=None, last_token_s=None, rejected_s=0.1)
    every = [replace(program(one), until_s=29.0) for one in (turn(0), waits, refused)]
    result = replay((), *every)
    found = measures_of(result)
    assert (found["jct_mean_s"], found["ttft_p99_s"]) == (5.0, pytest.approx(0.5 + 0.99 * 8.5))
    assert found["completion_offered_s"] == pytest.approx((1 + 9 + 9) / 3)
    [row] = compared(result, result)
    assert (row["live"]["means"]["completion_all_s"], row["live"]["means"]["ttft_all_s"]) == (5.0, 4.75)
    assert [completion for _, completion in row["live"]["blocks"]] == [5.0]
    assert (live.shown(row)["simulated completion s"], live.shown(row)["live TTFT s"]) == (5.0, 4.75)


def test_both_comparisons_measure_alike() -> None:
    result = replay((), program(turn(0), turn(1, known=100, cached=96)), program(turn(0)))
    replicas = [{"programs": 1, "programs_completed": 1}, {"programs": 0, "programs_completed": 2}]
    ours = live_routers.row_of(Subject("power_of_two"), Ran(result, replicas, 1))
    assert (ours["moves"], ours["split"]) == (1, 4 - 2 - 1)
    theirs = peer_routers.row_of("program", result, 3)
    assert theirs["scheduled_programs"] == 3
    assert measures_of(result).items() <= ours.items() and measures_of(result).items() <= theirs.items()
