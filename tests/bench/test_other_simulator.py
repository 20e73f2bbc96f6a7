"""The comparison with Dynamo's mocker: the trace that it gets, what is read from it, its step times and the verdict."""

from typing import Any

import numpy as np
import pytest

from benchmarks import peer_packages
from benchmarks.mocker import Limits, is_expressible, records_of, trace_lines
from benchmarks.mocker_timing import Polynomial, Tables
from benchmarks.other_simulator import (
    COMPARED,
    JUDGED,
    OURS,
    OWN,
    SAME,
    Measured,
    loads_of,
    main,
    misses,
    row_of,
    simulate,
)
from cluster.core.slo import Outcome, TurnRecord
from cluster.offline.bench.runner import Job
from cluster.offline.bench.workload import PlannedProgram, PlannedTurn
from replicas.presets import preset

COST = preset("llama-3.1-8b/h100")


def planned(fresh: int, output: int, pause_s: float = 0.0, kept: int | None = None, reset: bool = False) -> PlannedTurn:
    return PlannedTurn(fresh, output, output if kept is None else kept, "tool", pause_s, reset)


def program(*turns: PlannedTurn, group: str | None = None, prefix: int = 0) -> PlannedProgram:
    return PlannedProgram("recorded", "", turns, group, prefix)


def job(number: int, arrival_s: float, one: PlannedProgram) -> Job:
    return Job(f"p{number}", one, arrival_s, (0, 0, number))


def test_a_turn_has_its_new_tokens_its_pause_and_blocks_of_its_own_after_the_shared_ones() -> None:
    agent = program(planned(40, 5, pause_s=1.5), planned(20, 7), group="g", prefix=33)
    other = program(planned(40, 5), group="h", prefix=16)
    lines = list(
        trace_lines([job(0, 0.25, agent), job(1, 2.0, agent), job(2, 3.0, other), job(3, 4.0, program(planned(1, 1)))])
    )
    assert [line["request_id"] for line in lines] == ["p0.0", "p0.1", "p1.0", "p1.1", "p2.0", "p3.0"]
    assert [line["session_id"] for line in lines] == ["p0", "p0", "p1", "p1", "p2", "p3"]
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(40, 5), (20, 7)] * 2 + [
        (40, 5),
        (1, 1),
    ]
    assert [line.get("timestamp") for line in lines] == [250.0, None, 2000.0, None, 3000.0, 4000.0]
    assert [line.get("delay") for line in lines] == [None, 1500.0, None, 1500.0, None, None]
    ids = [line["hash_ids"] for line in lines]
    assert list(map(len, ids)) == [3, 2, 3, 2, 3, 1]
    # Two blocks of the prefix of 33 tokens are full; one of the other group's.
    assert ids[0][:2] == ids[2][:2]
    own = [*ids[0], *ids[1], *ids[2][2:], *ids[3], *ids[4], *ids[5]]
    assert len(set(own)) == len(own) == 12


@pytest.mark.parametrize(
    "turns",
    [
        (planned(40, 5, kept=4), planned(20, 7)),
        (planned(40, 5), planned(20, 7, reset=True)),
        (planned(40, 5), planned(0, 7)),
    ],
)
def test_a_context_that_does_not_only_grow_is_not_expressible(turns: tuple[PlannedTurn, ...]) -> None:
    assert not is_expressible(program(*turns))
    with pytest.raises(ValueError, match="p7: a context"):
        list(trace_lines([job(7, 0.0, program(*turns))]))
    assert is_expressible(program(planned(40, 5), planned(20, 7, kept=1)))  # nothing follows the last turn


REQUEST: dict[str, Any] = {
    "session_id": "p1",
    "turn_index": 1,
    "terminal_status": "completed",
    "arrival_time_ms": 149.0,
    "first_token_ms": 159.0,
    "last_token_ms": 162.0,
    "input_length": 150,
    "output_length": 4,
    "requested_output_length": 4,
    "reused_input_tokens": 96,
}


def test_a_request_of_the_report_becomes_a_turn_in_seconds() -> None:
    [first, turn, lost] = records_of(
        [REQUEST, REQUEST | {"session_id": "p2", "terminal_status": "rejected"}, REQUEST | {"turn_index": 0}]
    )
    assert (first.index, lost.program_id, lost.outcome, lost.first_token_s) == (0, "p2", Outcome.FAILED, None)
    assert turn == TurnRecord("p1", 1, 0.149, Outcome.OK, 0.159, 0.162, 150, 4, cached_tokens=96)
    assert turn.ttft_s == pytest.approx(0.010)
    assert turn.tpot_s == pytest.approx(0.001)
    with pytest.raises(ValueError, match=r"p1\.1: 3 tokens, not 4"):
        records_of([REQUEST | {"output_length": 3}])


def turn(start_s: float, first_s: float, last_s: float, tokens: int, cached: int = 0) -> TurnRecord:
    return TurnRecord("p", 0, start_s, Outcome.OK, first_s, last_s, 100, tokens, cached_tokens=cached)


def test_throughput_is_over_all_the_time_and_a_failed_turn_is_refused() -> None:
    turns = [turn(10.0, 10.5, 12.5, 21, 60), turn(11.0, 12.0, 14.0, 11), turn(12.0, 12.1, 12.1, 1)]
    measured = Measured.of(turns)
    assert (measured.turns, measured.makespan_s) == (3, 4.0)
    assert measured.tokens_per_s == pytest.approx(33 / 4)
    assert measured.ttft_p50_s == pytest.approx(0.5)
    assert measured.tpot_mean_s == pytest.approx(0.15)  # 0.1 and 0.2; one token has none
    assert measured.cached == pytest.approx(0.2)
    with pytest.raises(ValueError, match="1 of 4 turns"):
        Measured.of([*turns, TurnRecord("p", 0, 0.0, Outcome.UNFINISHED)])


def measured(**values: float) -> Measured:
    return Measured(turns=5, **(dict.fromkeys((*COMPARED, "makespan_s"), 1.0) | values))


def test_only_throughput_and_tpot_below_saturation_are_judged() -> None:
    slow = measured(tokens_per_s=0.84, tpot_mean_s=1.16, ttft_p50_s=2.0, ttft_p99_s=3.0)
    near = measured(tokens_per_s=0.86, tpot_mean_s=1.14)
    assert row_of(SAME, 0.3, 1.0, slow, measured(tokens_per_s=2.0))["ratio_tokens_per_s"] == pytest.approx(0.42)
    found = misses([row_of(name, 0.3, 1.0, slow, measured()) for name in (SAME, OURS, OWN)])
    assert [miss.split(":")[1].split()[0] for miss in found] == ["tokens_per_s", "tpot_mean_s"] * len(JUDGED)
    assert not misses([row_of(SAME, 0.9, 1.0, near, measured()), row_of(SAME, 1.0, 1.0, slow, measured())])


def test_steps_take_what_the_mocker_took() -> None:
    """Dynamo's mocker (ai-dynamo-runtime 1.6.1) gave these times for two prompts of 1,000 tokens and 4,000 blocks."""
    jobs = [job(0, 0.0, program(planned(1000, 40))), job(1, 0.190, program(planned(1000, 10)))]
    turns = simulate(jobs, Limits(4000, 8192, 256), COST, Polynomial(), 1040)
    found = [((one.first_token_s or 0.0) * 1e3, (one.last_token_s or 0.0) * 1e3) for one in turns]
    assert found == [pytest.approx((32.105859, 328.846209)), pytest.approx((228.922420, 295.804344))]


@pytest.mark.parametrize(("sequences", "context"), [(1, 500), (8, 4000), (64, 2500)])
def test_tables_have_a_cost_models_decodes_and_prompts(sequences: int, context: int) -> None:
    alone, added = (Tables.of(COST, 40_000, alone=alone) for alone in (True, False))
    total = sequences * context
    decode_s = COST.decode_step_s(sequences, total)
    for tables in (alone, added):
        assert tables.decode_ms(sequences, total, COST.kv_capacity_tokens) == pytest.approx(decode_s * 1e3, rel=0.01)
    assert alone.prefill_ms(2, 1700, 200) == pytest.approx(COST.prefill_s(3000) * 1e3, rel=0.01)
    both_s = COST.step_s(3000 + sequences, total + 3000, sequences + 1, 3000 * 3001 / 2 + total)
    assert added.prefill_ms(2, 1700, 200) + decode_s * 1e3 == pytest.approx(both_s * 1e3, rel=0.1)
    assert alone.prefill_ms(1, 200, 200) == 0.0


def test_tables_are_saved_as_the_mocker_reads_them(tmp_path: Any) -> None:
    tables = Tables.of(COST, 40_000, alone=True)
    tables.save(tmp_path / "tables.npz")
    with np.load(tmp_path / "tables.npz") as saved:
        names = ["decode_active_kv_tokens", "decode_context_length", "decode_itl", "prefill_isl", "prefill_ttft_ms"]
        assert sorted(saved.files) == names
        assert saved["decode_itl"].shape == (
            *saved["decode_active_kv_tokens"].shape,
            *saved["decode_context_length"].shape,
        )
        assert saved["decode_itl"].max() > 10 > saved["decode_itl"].min()  # milliseconds


def test_without_the_mocker_it_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peer_packages.why_absent("json") is None
    assert "no module 'no_such_peer.api'" in (peer_packages.why_absent("no_such_peer.api") or "")
    monkeypatch.setattr(peer_packages, "why_absent", lambda module: f"skipped: {module}")
    assert main([]) == peer_packages.SKIPPED
    assert capsys.readouterr().out == "skipped: dynamo.replay.api\n"


@pytest.mark.parametrize("loads", ["", ",", "0.3,", "0", "-1", "nan", "inf", "much"])
def test_loads_that_are_no_numbers_above_zero_are_refused(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([f"--loads={loads}"])
    assert stopped.value.code == 2
    assert "argument --loads" in capsys.readouterr().err
    assert loads_of("0.3,4") == [0.3, 4.0]
