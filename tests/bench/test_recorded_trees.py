"""Trees of programs: in a trace, as a workload, in the simulator and against a server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trees import WIDTH, fan_outs, sessions
from cluster.core.errors import TraceError
from cluster.core.recorded_turn import lines_of
from cluster.core.slo import Outcome
from cluster.offline.bench.runner import Job, children_of
from cluster.offline.bench.trace import programs_from_trace
from cluster.offline.bench.workload import PlannedProgram, PlannedTurn, Shaping
from tests.bench.test_replay import run
from tests.bench.test_workload import recorded, recorded_turn, written

SESSIONS = Path(__file__).parents[2] / ".." / "shared" / "data" / "programs" / "kvtester_cc.jsonl.gz"
needs_sessions = pytest.mark.skipif(not SESSIONS.is_file(), reason="the recorded traces (../shared/data) are not here")


def child(name: str, parent: str | None = "a", turn: int | None = 0, *turns: dict[str, Any]) -> dict[str, Any]:
    return recorded(*turns, program_id=name, category="sub", parent_program_id=parent, parent_turn=turn)


def planned(*programs: dict[str, Any], path: Path, **options: Any) -> tuple[PlannedProgram, ...]:
    return programs_from_trace(written(path / "t.jsonl", *programs), **options).programs


# --- traces -----------------------------------------------------------------------------------------------------------


def test_children_are_part_of_the_turn_after_which_they_run(tmp_path: Path) -> None:
    """A parent may come after its child in the file, and children may have children."""
    programs = planned(child("g", "b"), child("b"), recorded(), child("c"), recorded(program_id="z"), path=tmp_path)
    assert [program.program_id for program in programs] == ["a", "z"]
    first, last = programs[0].turns
    assert [each.program_id for each in first.children] == ["b", "c"] and not last.children
    assert [each.program_id for each in programs[0].family()] == ["a", "b", "g", "c"]


def test_the_duration_of_a_pause_with_children_need_not_be_recorded(tmp_path: Path) -> None:
    first = recorded_turn(new_prompt_tokens=100, tool="task", tool_duration_s=None)
    last = recorded_turn(context_tokens=115, tool=None, tool_duration_s=None, tool_return_tokens=None)
    assert planned(recorded(first, last), child("b"), path=tmp_path)
    with pytest.raises(TraceError, match=r"turns\.0\.tool_duration_s"):
        planned(recorded(first, last), path=tmp_path)
    # A child without a duration leaves no half a tree.
    alone = recorded(program_id="z")
    assert [
        p.program_id
        for p in planned(recorded(), child("b", "a", 0, first, last), alone, path=tmp_path, only_recorded=True)
    ] == ["z"]


def test_a_parent_without_parent_turn_is_noted(tmp_path: Path) -> None:
    workload = programs_from_trace(written(tmp_path / "t.jsonl", recorded(), child("b", "a", None)))
    assert len(workload.programs) == 2
    assert workload.notes == (
        "1 programs name a parent without parent_turn: they are replayed as programs of their own",
    )


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([recorded(), child("b", "nobody")], r":2: parent_program_id: 'nobody' is not in the trace"),
        ([recorded(), child("b", None)], r":2: parent_turn: there is no parent_program_id"),
        ([recorded(), child("b", "a", 1)], r":2: parent_turn: 1, but 'a' has 2 turns and no pause after its last"),
        ([recorded(), child("b", "a", -1)], r":2: parent_turn: .*greater than or equal to 0"),
        ([recorded(), child("b", "c"), child("c", "b")], r":2: parent_program_id: 'b' is below its own child"),
        ([recorded(), child("b", "b")], r":2: parent_program_id: 'b' is below its own child"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_with_line_and_key(
    tmp_path: Path, programs: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        planned(*programs, path=tmp_path)


def test_shaping_applies_to_all_of_a_tree(tmp_path: Path) -> None:
    workload = programs_from_trace(written(tmp_path / "t.jsonl", recorded(), child("b")))
    [tree] = workload.programs
    [scaled] = workload.shaped(Shaping(scale_lengths=0.5), 1).programs
    assert scaled.turns[0].children[0].contexts() == [50, 57]
    [cut] = workload.shaped(Shaping(max_turns=1), 1).programs
    assert not cut.turns[0].children
    large = replace(tree.turns[0].children[0], turns=(PlannedTurn(900, 1, 1),))
    grown = replace(
        workload, programs=(replace(tree, turns=(replace(tree.turns[0], children=(large,)), tree.turns[1])),)
    )
    assert grown.programs[0].peak_tokens == 901
    assert grown.shaped(Shaping(max_context=500), 1).dropped == 1


def test_the_synthetic_fan_out_is_a_trace(tmp_path: Path) -> None:
    programs = planned(*fan_outs(2), path=tmp_path)
    assert [program.kind for program in programs] == ["fan_out", "alone", "alone"] * 2
    children = programs[0].turns[0].children
    assert len(children) == WIDTH and len({each.prefix_group for each in children}) == 1
    assert programs[3].turns[0].children[0].prefix_group != children[0].prefix_group


@needs_sessions
def test_the_recorded_sessions_have_their_sub_agents_in_pauses(tmp_path: Path) -> None:
    """t0254 starts three sub-agents after its second turn, which ended 80 to 95 s later within a pause of 112 s."""
    found = [*sessions([json.loads(line) for _, line in lines_of(SESSIONS)])]
    programs = planned(*found, path=tmp_path)
    assert len(programs) == 9 and sum(len([*program.family()]) - 1 for program in programs) == 37
    session = next(program for program in programs if program.program_id.endswith("t0254"))
    assert {index: len(turn.children) for index, turn in enumerate(session.turns) if turn.children} == {1: 3, 35: 2}


# --- jobs against a server --------------------------------------------------------------------------------------------

SUB = PlannedProgram("sub", "s", (PlannedTurn(20, 3, 3, "ls", 0.01), PlannedTurn(4, 2, 2)))
PARENT = PlannedProgram("parent", "k", (PlannedTurn(50, 6, 6, "task", 5.0, children=(SUB, SUB)), PlannedTurn(8, 2, 2)))


def test_jobs_of_children_have_ids_and_seeds_of_their_own() -> None:
    first, second = children_of(Job("p0", PARENT, 0.0, (1, 2)), 0, 3.5)
    assert (first.program_id, second.program_id) == ("p0.0.0", "p0.0.1")
    assert first.seed != second.seed and first.arrival_s == 3.5
    assert children_of(Job("p0", PARENT, 0.0, (1, 2)), 1, 3.5) == []


async def test_a_server_gets_children_in_the_pause_with_the_name_of_their_parent(cluster_double) -> None:  # type: ignore[no-untyped-def]
    ended = []
    records = await run(cluster_double, [Job("p0", PARENT, 0.0, (0, 0, 0))], ended=ended.append)
    assert [record.program_id for record in records] == ["p0", "p0.0.0", "p0.0.1"]
    assert all(record.outcome is Outcome.OK for record in records)
    assert sorted(record.program_id for record in ended) == ["p0", "p0.0.0", "p0.0.1"]
    ids = [body["vllm_xargs"]["job_id"] for body in cluster_double.bodies]
    assert ids[0] == ids[-1] == "p0" and set(ids[1:-1]) == {"p0.0.0", "p0.0.1"}
    parents = {(each["x-session-id"], each.get("x-parent-session-id")) for each in cluster_double.headers}
    assert parents == {("p0", None), ("p0.0.0", "p0"), ("p0.0.1", "p0")}
    parent, *children = records
    resumed_s = parent.turns[1].intended_start_s
    assert resumed_s >= max(each.turns[-1].last_token_s for each in children)
    assert resumed_s - parent.turns[0].last_token_s < 4.0, "the recorded 5 s are not replayed"
