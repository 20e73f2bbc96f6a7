"""`make tables`: what it runs, that it goes on where it ended, and what it writes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import tables
from benchmarks.results import REPORTED_AHEAD, simulated_command
from benchmarks.tables import Call, calls_of, collect, keep_unfinished, meaning, restore, run_all, seeds_of
from cluster.core.registry import PEERS, POLICIES
from cluster.offline.simulator.settings import BASELINES

PLAN: dict[str, Any] = yaml.safe_load((Path(tables.__file__).parent / "tables.yaml").read_text())


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    for spec in PLAN["runs"].values():
        (tmp_path / f"{spec['trace']}.jsonl.gz").touch()
    return tmp_path


def test_each_policy_and_seed_of_a_table_is_a_call(traces: Path) -> None:
    calls = list(calls_of(PLAN, traces, "", quick=False))
    assert len(calls) == sum(5 * len(spec["policies"]) for spec in PLAN["runs"].values())
    assert {call.policy for call in calls} <= {*BASELINES, *POLICIES, *PEERS}
    assert {call.seed for call in calls} == set(range(5))
    quick = list(calls_of(PLAN, traces, "simulate_merge", quick=True))
    assert {call.table for call in quick} == {"simulate_merge"}
    assert {call.arguments[3] for call in quick} == {"1.5x"}
    assert all(("augserve.target_tokens=256" in call.arguments) == (call.policy == "augserve") for call in calls)
    own = {call.table for call in calls if "continuum.pins_yield=waiting" in call.arguments}
    assert "simulate_merge" in own and "simulate_iso_bench" not in own, "parameters of one table"
    assert len({call.stored(traces) for call in (*calls, *quick)}) == len(calls) + len(quick)
    assert [call.seed for call in calls] == sorted(call.seed for call in calls), "all tables with a seed, then the next"
    assert seeds_of("", calls) == set(range(5)) and seeds_of("0,3", calls) == {0, 3}
    with pytest.raises(ValueError, match="--seeds 0,5: there are 0, 1, 2, 3, 4"):
        seeds_of("0,5", calls)


def test_what_does_not_exist_is_named(traces: Path) -> None:
    with pytest.raises(ValueError, match="--only nothing: there are simulate_merge"):
        list(calls_of(PLAN, traces, "nothing", quick=False))
    with pytest.raises(ValueError, match=r"--traces: there is no .*infercept_merge"):
        list(calls_of(PLAN, traces / "elsewhere", "", quick=False))


def test_it_goes_on_where_it_ended_and_writes_only_whole_tables(
    monkeypatch: pytest.MonkeyPatch, traces: Path, tmp_path: Path
) -> None:
    ran: list[str] = []

    def run(call: Call, folder: Path) -> str:
        ran.append(call.policy)
        if call.policy == "augserve" and len(ran) < 4:
            return ": exit status 1: no memory"
        call.stored(folder).write_text(json.dumps({"policy": call.policy, "command": "", "completed": 3}) + "\n")
        return ""

    monkeypatch.setattr(tables, "run", run)
    calls = list(calls_of(PLAN, traces, "simulate_noise", quick=True))
    assert run_all(calls, tmp_path, 1) == {"simulate_noise"}
    assert ran == ["infercept", "augserve", "caesura"]
    assert run_all(calls, tmp_path, 1) == set()
    assert ran[3:] == ["augserve"]
    path = collect(calls, tmp_path, tmp_path / "out", MADE)
    assert path is not None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["policy"] for row in rows] == ["infercept", "augserve", "caesura"]
    assert rows[0]["command"].startswith("caesura simulate --trace infercept_merge.jsonl.gz --rates 0.9x")
    assert MADE.items() <= rows[0].items()


MADE = {"state": "abc", "commit": "1234567", "date": "2026-11-27"}


def test_another_machine_goes_on_from_kept_results_of_the_same_code(
    monkeypatch: pytest.MonkeyPatch, traces: Path, tmp_path: Path
) -> None:
    def run(call: Call, folder: Path) -> str:
        call.stored(folder).write_text(json.dumps({"policy": call.policy, "seed": call.seed}) + "\n")
        return ""

    monkeypatch.setattr(tables, "run", run)
    first, second, other, out = (tmp_path / name for name in ("first", "second", "other", "out"))
    for folder in (first, second, other):
        folder.mkdir()
    calls = list(calls_of(PLAN, traces, "simulate_noise", quick=False))
    two = [call for call in calls if call.seed < 2]
    run_all([*two, calls[-1]], first, 1)
    path = collect(calls, first, out, MADE)
    assert path is not None
    before = path.read_text()
    assert [json.loads(line)["seed"] for line in before.splitlines()] == [0, 0, 0, 1, 1, 1], "only whole seeds"
    restore(calls, second, out, "abc")
    assert sorted(second.iterdir()) == sorted(call.stored(second) for call in two)
    keep_unfinished(calls, first, out, MADE)
    [left] = (out / tables.UNFINISHED).read_text().splitlines()
    assert json.loads(left)["seed"] == 4
    restore(calls, second, out, "abc")
    assert sorted(second.iterdir()) == sorted(call.stored(second) for call in (*two, calls[-1]))
    assert collect(calls, second, out, MADE | {"commit": "7654321"}) == path
    assert path.read_text() == before
    restore(calls, other, out, "another state")
    assert list(other.iterdir()) == []
    run_all(calls, second, 1)
    keep_unfinished(calls, second, out, MADE)
    assert not (out / tables.UNFINISHED).exists()
    assert collect(calls, other, out, MADE) is None


def test_the_state_covers_all_that_a_simulation_imports() -> None:
    """Run in a process of its own, because this one has imported more."""
    code = (
        "import json, sys; sys.argv = ['caesura', 'simulate', '--policies', 'caesura', '--rates', '1', '--minutes',"
        " '0.05', '--warmup', '0', '--quiet', '--router', 'caesura', '--replicas', '2']\n"
        "from cluster.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(json.dumps([m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', 0)]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tables.ROOT, capture_output=True, text=True, check=True)
    files = [Path(name) for name in json.loads(ended.stdout.splitlines()[-1])]
    own = {str(path.relative_to(tables.ROOT)) for path in files if path.is_relative_to(tables.ROOT)}
    own = {name for name in own if not name.startswith(".") and not name.endswith("__init__.py")}
    assert "replicas/scheduler.py" in own
    assert {name for name in own if not name.startswith(tables.SIMULATED)} == {"cluster/cli.py"}


def test_only_what_decides_a_result_changes_the_state(tmp_path: Path) -> None:
    code = 'LIMIT = 1\n"""Of tokens."""\n\n\ndef size():\n    """Return it."""\n    return "text"\n'
    path = tmp_path / "a.py"

    def of(text: str) -> bytes:
        path.write_text(text)
        return meaning(path)

    before = of(code)
    assert of(code.replace("Of tokens", "In tokens").replace("Return it", "Give it") + "# a comment\n") == before
    assert of(code.replace("1", "2")) != before
    assert of(code.replace('"text"', '"other"')) != before
    plan = tmp_path / "a.yaml"
    plan.write_text("a: 1 # one\n")
    assert meaning(plan) == b"a: 1 # one\n"


def test_the_printed_command_keeps_the_parameters_of_a_policy() -> None:
    tuned = "caesura simulate --trace t --policies augserve --seed 0 --rates 1 --set augserve.b=0.1 --set augserve.a=0"
    rows = [{"command": "caesura simulate --trace t --policies vllm --seed 0 --rates 1"}, {"command": tuned}]
    rows += [{"command": tuned.replace("--seed 0", "--seed 1")}]
    assert simulated_command(rows) == "caesura simulate --trace t --rates 1 --set augserve.b=0.1 --set augserve.a=0"


def test_the_printed_command_has_what_clients_reported_before_there_was_an_option() -> None:
    row = {"command": "caesura simulate --trace t --policies vllm --seed 0 --rates 1", "commit": "1234567"}
    assert simulated_command([row]) == "caesura simulate --trace t --rates 1"
    older = [row | {"commit": commit} for commit in REPORTED_AHEAD]
    assert simulated_command(older) == "caesura simulate --trace t --rates 1 --reports ahead"
