"""`caesura simulate`: its JSON lines, that they can be had again, its limits and its complaints."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.config.schema import PolicyConfig
from cluster.core.errors import ConfigError
from cluster.core.registry import PEERS, POLICIES
from cluster.offline.simulator.settings import SimulationSettings, policy_names
from tests.simulator.simulated import COST

KEYS = [
    "policy",
    "preset",
    "rate",
    "seed",
    "host_gib",
    "offered",
    "completed",
    "goodput_programs",
    "attainment",
    "ttft_s",
    "jct_s",
    "jct_wall_s",
    "norm_latency_s",
    "bubble_s",
    "recomputed_tokens",
    "reused_tokens",
    "fetched_tokens",
    "wasted_gib_s",
    "wasted_by_cause_gib_s",
    "goodput_programs_first",
    "goodput_requests",
    "completion_all_s",
    "ttft_all_s",
    "refused",
    "longest_wait_s",
    "jain",
    "kinds",
    "schedule_ms",
    "wall_s_per_minute",
]
REAL_TIME = ("schedule_ms", "wall_s_per_minute", "command")


def caesura(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["caesura", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def small(trace: Path, *more: str) -> tuple[str, ...]:
    return ("--trace", str(trace), "--minutes", "0.5", "--warmup", "0.25", "--rates", "2", *more)


def test_a_line_a_run_with_the_same_numbers_every_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, small_trace: Path
) -> None:
    what = small(small_trace, "--policies", "vllm,vllm-nocache,continuum,mars", "--seed", "3")
    first, second, third, plots = (tmp_path / name for name in ("first", "second", "third", "plots"))
    assert caesura(monkeypatch, *what, "--json", str(first), "--plots", str(plots)) == 0
    shown = capsys.readouterr().out
    assert caesura(monkeypatch, *what, "--json", str(second), "--quiet") == 0
    # Once more in a process of its own, whose strings hash differently.
    only = small(small_trace, "--policies", "mars", "--seed", "3", "--quiet", "--jobs", "2")
    assert caesura(monkeypatch, *only, "--json", str(third)) == 0
    results, again = lines(first), [*lines(second), *lines(third)]
    assert [line["policy"] for line in results] == ["vllm", "vllm-nocache", "continuum", "mars"]
    for line, repeated in zip([*results, results[-1]], again, strict=True):
        assert set(KEYS) <= line.keys()
        assert line["ttft_s"].keys() == {"mean", "p50", "p95", "p99"}
        assert line["schedule_ms"].keys() == {"mean", "p99"}
        assert {k: v for k, v in line.items() if k not in REAL_TIME} == {
            k: v for k, v in repeated.items() if k not in REAL_TIME
        }
        # At a load this low all is well, and 30 s of arrivals at 2/s are measured.
        assert line["completed"] == line["offered"] == round(line["goodput_programs"] * 30)
        assert 30 < line["offered"] < 100
        assert line["attainment"] == line["attainment_first"] == 1.0
        # All have completed, so that those with unfinished programs in are the same numbers.
        assert (line["completion_all_s"], line["ttft_all_s"]) == (line["jct_s"], line["ttft_s"])
        assert 0.0 < line["jain"] <= 1.0
        assert sum(line["wasted_by_cause_gib_s"].values()) == pytest.approx(line["wasted_gib_s"])
    assert [line["simulation"]["oracle"] for line in results] == [False, False, False, True]
    assert results[1]["reused_tokens"] == 0 < results[0]["reused_tokens"]
    assert "Given true lengths and durations: mars." in shown
    assert "Know the tool's name and what they have learnt in the run: continuum." in shown
    assert (plots / "goodput.svg").stat().st_size > 1000


def test_fresh_processes_agree_with_a_host_tier_and_on_what_policies_learn(tmp_path: Path, varied_trace: Path) -> None:
    # A device of 4,096 tokens, so that contexts are lost; a host of 240 blocks, so that some are lost there, too.
    device = tmp_path / "device.json"
    COST.save(device)
    names = ("vllm-nocache", "vllm", "caesura", "continuum2")
    load = ("--preset", str(device), "--host-gib", "3.75", "--rates", "12", "--minutes", "0.3", "--warmup", "0.1")
    told, shown = [], ""
    for hash_seed in ("1", "2"):
        out = tmp_path / hash_seed
        arguments = ["simulate", "--trace", str(varied_trace), *load, "--policies", ",".join(names), "--json", str(out)]
        program = f"import sys; from cluster.cli import main; sys.argv[1:] = {arguments!r}; main()"
        # Without the level of the log that the tests set: what users see.
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_LOGGING_LEVEL"} | {"PYTHONHASHSEED": hash_seed}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)
        shown, progress = ended.stdout.decode(), ended.stderr.decode()
        # In a pipe: nothing is cut, nothing of vLLM's log is among the results, and progress is on stderr.
        assert "…" not in shown and not re.search(r"(INFO|WARNING) \d\d-\d\d", shown)
        assert "runs: 0 of 4" in progress and "runs: 4 of 4 (continuum2 at 12/s)" in progress
        told.append([{k: v for k, v in line.items() if k not in REAL_TIME} for line in lines(out)])
    assert told[0] == told[1]
    assert tuple(line["policy"] for line in told[0]) == names
    without, stock, *ours = told[0]
    assert (without["fetched_tokens"], without["simulation"]["loaded_tokens"]) == (0, 0)
    assert all(line["fetched_tokens"] > 0 for line in (stock, *ours))
    assert "vllm-nocache (prefix cache off, no host tier), vllm (prefix cache on, host tier 3.75 GiB)" in shown


def test_a_burst_is_reported_in_windows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, small_trace: Path
) -> None:
    out = tmp_path / "out.jsonl"
    what = ("--trace", str(small_trace), "--policies", "vllm", "--rates", "1", "--minutes", "2", "--warmup", "0")
    assert caesura(monkeypatch, *what, "--burst", "4:30:30", "--json", str(out)) == 0
    [line] = lines(out)
    windows = line["simulation"]["recovery"]["windows"]
    assert [window["start_s"] for window in windows] == [0.0, 30.0, 60.0, 90.0]
    assert sum(window["offered"] for window in windows) == line["offered"]
    assert windows[1]["offered"] > 2 * windows[0]["offered"]
    assert "95% again" in capsys.readouterr().out


def test_routers_side_by_side_each_with_what_came_of_its_decisions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, small_trace: Path
) -> None:
    out = tmp_path / "out.jsonl"
    what = small(small_trace, "--policies", "caesura", "--replicas", "2", "--router", "caesura,round_robin")
    assert caesura(monkeypatch, *what, "--front", "max_moves=0", "--json", str(out)) == 0
    ours, around = lines(out)
    assert [(line["router"], line["policy"]) for line in (ours, around)] == [
        ("caesura", "caesura"),
        ("round_robin", "caesura"),
    ]
    routing = ours["simulation"]["routing"]
    assert routing["decisions"] == {"new": ours["offered"], "stayed": ours["offered"]}
    assert (routing["split"], routing["refused"], ours["simulation"]["front"]) == (0, 0, {"max_moves": 0})
    assert around["simulation"]["routing"]["split"] > 0
    shown = capsys.readouterr().out
    assert "round_robin" in shown and "good programs/s" in shown and "programs split" not in shown


def test_papers_policies_see_the_future_unless_a_flag_says_otherwise() -> None:
    names = ("vllm", "vllm-nocache", "continuum", "mars", "augserve")

    def told(oracle: bool | None) -> list[str]:
        settings = SimulationSettings(policies=names, rates_per_s=(1.0,), oracle=oracle)
        return [name for name in names if settings.sees_the_future(name)]

    assert told(None) == ["mars", "augserve"]
    assert told(True) == ["continuum", "mars", "augserve"]
    assert told(False) == []


def test_without_a_prefix_cache_only_our_policies_have_host_memory() -> None:
    names = ("vllm", "vllm-priority", "vllm-v0", "infercept")
    settings = SimulationSettings(policies=names, rates_per_s=(1.0,), host_gib=10.0)
    assert [settings.host_blocks(name) > 0 for name in names] == [True, True, False, True]
    without = replace(settings, prefix_cache=False)
    assert [without.host_blocks(name) > 0 for name in names] == [False, False, False, True]


def test_ends_are_always_reported_to_the_policy_whose_paper_knows_them() -> None:
    names = ("vllm", "continuum", "caesura", "vllm+pause=continuum")
    settings = SimulationSettings(policies=names, rates_per_s=(1.0,))
    assert [settings.reports_of(name) for name in names] == ["nothing", "ends", "nothing", "ends"]
    assert replace(settings, reports="ahead").reports_of("continuum") == "ahead"


def test_peers_are_simulated_only_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not set(PEERS) & set(policy_names("all"))
    names = ("vllm", "sglang", "vllm-priority")
    settings = SimulationSettings(policies=names, rates_per_s=(1.0,), oracle=True, host_gib=10.0)
    assert not any(settings.sees_the_future(name) for name in names)
    assert [settings.host_blocks(name) > 0 for name in names] == [True, False, True]
    assert settings.tier("sglang") == "prefix cache on, no host tier"

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("replicas.peers.agentinfer.version", missing)
    with pytest.raises(ConfigError, match="--policies agentinfer: the package agentinfer is not installed"):
        SimulationSettings(policies=("agentinfer",), rates_per_s=(1.0,))


def test_axes_of_policies_can_be_mixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, varied_trace: Path) -> None:
    names = ("vllm", "vllm+order=infercept", "vllm+pause=continuum+budget=infercept")
    settings = SimulationSettings(policies=names, rates_per_s=(1.0,))
    assert settings.scheduler(names[1]) == PolicyConfig(name="vllm", order="infercept")
    assert settings.scheduler(names[2]) == PolicyConfig(name="vllm", pause="continuum", budget="infercept")
    mixed = "mars+pause=vllm"
    set_ = SimulationSettings(policies=(mixed,), rates_per_s=(1.0,), parameters={mixed: {"refresh_steps": 9}})
    assert set_.scheduler(mixed) == PolicyConfig(name="mars", pause="vllm", parameters={"refresh_steps": 9})
    assert [settings.sees_the_future(name) for name in names] == [False, True, True]
    assert not settings.sees_the_future("plas+pause=continuum")

    device, out = tmp_path / "device.json", tmp_path / "out"
    COST.save(device)
    what = ("--trace", str(varied_trace), "--preset", str(device), "--minutes", "0.1", "--warmup", "0")
    given = ("--policies", "vllm+pause=continuum,plas", "--rates", "0.5x", "--quiet", "--json", str(out))
    assert caesura(monkeypatch, *what, *given) == 0
    assert [line["policy"] for line in lines(out)] == ["vllm+pause=continuum", "plas"]


def test_all_is_every_policy_once_and_the_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES._entries, "clairvoyant", "somewhere:Parameters")
    assert policy_names("all") == (
        "vllm-nocache",
        "vllm",
        *(name for name in POLICIES if name not in ("vllm", "clairvoyant")),
        "clairvoyant",
    )
    assert policy_names(" a, b,") == ("a", "b")


def test_a_rate_can_be_a_share_of_the_capacity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, varied_trace: Path
) -> None:
    device, out = tmp_path / "device.json", tmp_path / "out"
    COST.save(device)
    what = ("--trace", str(varied_trace), "--preset", str(device), "--minutes", "0.1", "--warmup", "0")
    shares = ("--rates", "0.25x,1,0.5x", "--policies", "vllm", "--quiet", "--json", str(out))
    assert caesura(monkeypatch, *what, *shares) == 0
    quarter, one, half = lines(out)
    assert (one["rate"], quarter["simulation"]["share_of_capacity"]) == (1.0, 0.25)
    assert half["simulation"]["share_of_capacity"] == 0.5
    assert quarter["rate"] == pytest.approx(0.25 * quarter["simulation"]["capacity_per_s"], rel=1e-4)
    assert half["rate"] == pytest.approx(2 * quarter["rate"], rel=1e-4)


def test_what_is_measured_and_what_policies_get_may_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, small_trace: Path
) -> None:
    def measured(*more: str) -> dict[str, Any]:
        path = tmp_path / "line"
        assert caesura(monkeypatch, *small(small_trace, "--policies", "caesura", "--json", str(path), *more)) == 0
        return lines(path)[0]

    both = measured()
    neither = measured("--slo-ttft", "none")
    assert "Nothing has a bound." in capsys.readouterr().out
    blind = measured("--policy-slo-ttft", "none")
    assert "Policies and routers get no bound." in capsys.readouterr().out
    assert neither["goodput_programs"] is neither["attainment_ttft"] is None
    assert both["goodput_programs"] is not None and blind["goodput_programs"] is not None
    # Without a bound the policy does the same, whatever is measured.
    assert blind["completion_all_s"] == neither["completion_all_s"]
    assert measured("--slo-ttft", "none", "--policy-slo-ttft", "1")["completion_all_s"] == both["completion_all_s"]


def test_the_bounds_of_a_call() -> None:
    settings = SimulationSettings(("vllm",), (1.0,), slo_ttft="2", policy_slo_ttft="0.5", slo_per_turn_x=3.0)
    measured, given = settings.goodput_slo(), settings.slo()
    assert (measured.ttft_s, measured.slowdown, given.ttft_s, given.slowdown) == (2.0, 3.0, 0.5, 3.0)
    assert measured.normalized_latency_s == pytest.approx(10 * settings.cost_model().decode_step_s())
    assert given.normalized_latency_s is None, "it is measured, and no policy gets it"


def test_a_fixed_count_of_programs_is_all_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, small_trace: Path
) -> None:
    out = tmp_path / "out"
    what = ("--trace", str(small_trace), "--rates", "2,4", "--policies", "vllm", "--json", str(out))
    assert caesura(monkeypatch, *what, "--count", "30", "--warmup", "0") == 0
    assert "30 programs, 2 programs/s, poisson" in capsys.readouterr().out
    two, four = lines(out)
    assert (two["offered"], four["offered"], two["simulation"]["count"]) == (30, 30, 30)
    assert four["goodput_programs"] == pytest.approx(
        2 * two["goodput_programs"], rel=1e-6
    )  # the same draws, twice as fast
    assert caesura(monkeypatch, *what, "--count", "30", "--warmup", "0.1", "--quiet") == 0
    assert 15 <= lines(out)[0]["offered"] < 30
    assert caesura(monkeypatch, *what, "--count", "30", "--warmup", "5") == 2
    assert "--warmup: all 30 programs arrive in its 300 s" in capsys.readouterr().err


def test_each_error_of_what_is_given_is_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, varied_trace: Path
) -> None:
    device, out = tmp_path / "device.json", tmp_path / "out"
    COST.save(device)
    what = ("--trace", str(varied_trace), "--preset", str(device), "--minutes", "0.5", "--warmup", "0", "--rates", "2x")
    assert caesura(monkeypatch, *what, "--policies", "augserve", "--noise", "0,0.5", "--json", str(out)) == 0
    assert [line["simulation"]["noise"] for line in lines(out)] == [0.0, 0.5]
    shown = capsys.readouterr().out
    assert "errors of N(0, 0 x value)" in shown and "errors of N(0, 0.5 x value)" in shown
    exact, noisy = lines(out)
    assert exact["completion_all_s"] != noisy["completion_all_s"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--count", "0"), "--count: 0 must be more than 0"),
        (
            ("--policies", "nothing"),
            "--policies: unknown policy 'nothing'; choose all or some of: agentinfer, augserve",
        ),
        (
            ("--policies", "sglang", "--set", "sglang.policy=lof"),
            "--set sglang.policy: Input should be 'fcfs' or 'lpm'",
        ),
        (("--policies", "vllm-priority+order=mars"), "--policies: unknown policy 'vllm-priority'"),
        (("--count", "5", "--minutes", "1"), "--count, --minutes: give one of them"),
        (("--count", "5", "--burst", "9:1:1"), "--count: with neither --burst nor --under-way"),
        (("--count", "1000000"), "--count: 1000000 programs in a run"),
        (("--noise", "0.1,x"), "--noise: could not convert"),
        (("--noise", "0.1,0.1"), "--noise: 0.1,0.1 is empty or repeats a value"),
        (("--categories", "nothing"), "--categories: there is no nothing; there are"),
        (("--calls", "2-"), "--calls: '2-' is not a number, or MIN-MAX"),
        (("--calls", "3-2"), "--calls: 3-2 is not a number, or MIN-MAX"),
        (("--calls", "1000"), "--calls: no program has so many calls"),
        (("--no-calls-share", "1.5"), "--no-calls-share: 1.5 must be from 0 to 1"),
        (("--repeat-turns", "0"), "--repeat-turns: 0 must be more than 0"),
        (("--missing-tool-s", "1", "--only-recorded"), "--missing-tool-s, --missing-tools-from, --only-recorded: give"),
        (("--policies", "nobody"), "unknown policy 'nobody'; choose all or some of: agentinfer, augserve"),
        (("--policies", "vllm+order=nobody"), "--policies: unknown policy 'nobody'"),
        (("--policies", "vllm+price=mars"), "vllm+price=mars: 'price' is not one of order, pause, budget"),
        (("--policies", "vllm+order=mars+order=plas"), "'order' is not one of order, pause, budget, or is there twice"),
        (("--policies", "vllm,vllm"), "--policies: vllm,vllm is empty or repeats a value"),
        (("--policies", ""), "--policies:  is empty"),
        (("--rates", "4,x"), "--rates: could not convert"),
        (("--rates", "0"), "--rates: 0.0 must be more than 0"),
        (("--rates", "1000000"), "--rates: 84000"),
        (("--seed", "-1"), "--seed: -1 must be 0 or more"),
        (("--slo-ttft", "0"), "--slo-ttft: 0.0 must be more than 0"),
        (("--slo-ttft", "fast"), "--slo-ttft: 'fast' is neither a number of seconds nor none"),
        (("--policy-slo-ttft", "-1"), "--policy-slo-ttft: -1.0 must be more than 0"),
        (("--slo-per-turn-x", "0.5"), "--slo-per-turn-x: 0.5 must be 1 or more"),
        (("--host-gib", "-1"), "--host-gib: -1.0 must be 0 or more"),
        (("--host-gib", "1e-6"), "--host-gib: 1e-06 is less than the KV of one block"),
        (("--preset", "opt-13b/toaster"), "unknown device 'toaster'"),
        (("--preset", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--router", "nobody"), "--router: unknown router 'nobody'; choose all or some of: caesura"),
        (("--router", "caesura,caesura"), "--router: caesura,caesura is empty or repeats a value"),
        (("--front", "max_moves=-1"), "--front max_moves: Input should be greater"),
        (("--max-ongoing", "0"), "--max-ongoing: 0 must be more than 0"),
        (("--under-way", "5", "--rates", "1,2"), "--under-way: programs come as others end"),
        (("--arrivals", "recorded:nowhere"), "--arrivals: nowhere: cannot be read as a trace of requests"),
        (("--arrivals", "gamma:0"), "--arrivals: 'gamma:0'"),
        (("--burst", "9:1"), "--burst: '9:1' is not RATE:START_S:LENGTH_S"),
        (("--burst", "9:800:60"), "--burst: it ends at 860 s, after the last arrival"),
        (
            ("--max-batched-tokens", "100", "--max-seqs", "101"),
            "--max-batched-tokens: 100 is less than --max-seqs (101)",
        ),
        (("--policies", "continuum", "--set", "continuum.delta=2"), "--set continuum.delta: Input should be less than"),
        (("--policies", "vllm", "--set", "continuum.delta=0.2"), "--set continuum: no policy of that name"),
        (("--set", "delta=0.2"), "--set delta: must be policy.parameter=value"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl:1: cannot be read"),
        (("--max-context", "1"), "--preset, --max-context: none of 1200 programs fits 1 tokens"),
    ],
)
def test_bad_input_names_its_flag_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert caesura(monkeypatch, *arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ({"preset": "opt-13b/h800"}, (8192, 1024)),
        ({"preset": "opt-13b/a100-80"}, (2048, 256)),
        ({"preset": "opt-13b/h800", "max_batched_tokens": 512}, (512, 512)),
        ({"preset": "opt-13b/h800", "max_batched_tokens": 512, "max_num_seqs": 64}, (512, 64)),
    ],
)
def test_a_step_has_the_limits_of_vllm_on_that_gpu(said: dict[str, Any], limits: tuple[int, int]) -> None:
    settings = SimulationSettings(policies=("vllm",), rates_per_s=(1.0,), **said)
    assert (settings.step_tokens, settings.step_sequences) == limits
