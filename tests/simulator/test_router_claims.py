"""What the routers' comparison makes of its rows: means over seeds, the load that hurts, claims that can be missed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import dynamo_router, peer_packages, router
from benchmarks.router import doubled, main, placement_shows
from benchmarks.router_rows import DRAIN_S, means, print_rows
from cluster.offline.simulator.settings import SimulationSettings


def row(router: str, jct_s: float, seed: int = 0, rate: float = 0.05, **more: Any) -> dict[str, Any]:
    columns = {
        "goodput_programs": 0.2,
        "hit_rate": 0.96,
        "load_max_over_mean": 1.2,
        "split": 0,
        "decisions": {"new": 1},
    }
    where = {"rate_per_replica": rate, "seed": seed, "router": router, "replicas": 16, "policy": "vllm"}
    return {**where, "jct_mean_s": jct_s, **columns, **more}


def test_rows_of_several_seeds_become_their_mean_in_the_order_of_the_first_ones() -> None:
    rows = [row("a", 60.0), row("a", 70.0, seed=1, split=3), row("b", 90.0, hit_rate=None), row("b", 92.0, seed=1)]
    first, second = means(rows)
    assert (first["router"], first["jct_mean_s"], first["split"], first["hit_rate"]) == ("a", 65.0, 1.5, 0.96)
    assert (second["router"], second["jct_mean_s"], second["hit_rate"]) == ("b", 91.0, None)


def test_rows_of_other_loads_and_schedulers_are_not_mixed() -> None:
    rows = [row("a", 60.0), row("a", 70.0, rate=0.02), row("a", 80.0, policy="caesura"), row("a", 90.0, memory=20.0)]
    assert means(rows) == rows


def test_the_load_is_the_first_at_which_no_peer_is_below_twice_the_best_at_the_lowest() -> None:
    rows = [row("a", 48.0, rate=0.02), row("b", 45.0, rate=0.02)]
    rows += [row("a", 89.0, rate=0.04), row("b", 120.0, rate=0.04), row("a", 90.0, rate=0.05), row("b", 130.0)]
    assert doubled(rows, (0.02, 0.04, 0.05)) == 0.05
    assert doubled(rows, (0.02, 0.04)) is None


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"jct_mean_s": 70.1}, ["mean completion"]),
        ({"goodput_programs": 0.29}, ["goodput"]),
        ({"hit_rate": 0.949}, ["KV hit rate"]),
        ({"hit_rate": None}, ["KV hit rate"]),
        ({"load_max_over_mean": 1.26}, ["largest replica's load"]),
        ({"split": 1 / 3}, ["split programs"]),
    ],
)
def test_a_claim_is_missed_where_its_number_is(changed: dict[str, Any], missed: list[str]) -> None:
    ours = {**row("caesura", 70.0, goodput_programs=0.31), **changed}
    claims = placement_shows(ours, [row("a", 100.0), row("b", 110.0)], [row("a", 50.0), row("b", 60.0)])
    assert [claim for claim, _, holds in claims if not holds] == [
        claim for claim, _, _ in claims if any(claim.startswith(words) for words in missed)
    ]
    assert len([1 for _, _, holds in claims if not holds]) == len(missed)


def test_a_load_that_does_not_hurt_is_no_load_to_claim_at() -> None:
    claims = placement_shows(row("caesura", 60.0), [row("a", 99.0)], [row("a", 50.0)])
    assert not claims[0][2]


@pytest.mark.parametrize("seeds", ["x", "0,0", "-1", "", "0,"])
def test_bad_seeds_are_refused_by_the_flags_name(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"--seed={seeds}"])
    assert "--seed: numbers by comma" in capsys.readouterr().err


def test_a_router_that_refuses_programs_gains_no_claim_by_it() -> None:
    ours = row("caesura", 60.0, goodput_programs=0.4, completion_offered_s=90.0, refused=10)
    claims = placement_shows(ours, [row("a", 100.0, completion_offered_s=100.0)], [row("a", 50.0)])
    [(_, completion, holds)] = [claim for claim in claims if claim[0].startswith("mean completion")]
    assert (completion, holds) == (0.9, False)


def test_how_many_programs_ended_stands_beside_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"completed": 577, "offered": 972, "refused": 0, "moves": 3, "waited": 0, "completion_offered_s": 70.0}
    print_rows([row("caesura", 68.0, **counts)])
    head, line = capsys.readouterr().out.splitlines()
    assert line[head.index("ended") - 11 : head.index("ended") + 5].strip() == "577 / 972"


def test_both_routers_comparisons_let_programs_end_as_the_tables_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = yaml.safe_load((Path(router.__file__).parent / "tables.yaml").read_text())
    assert f"--drain-s {DRAIN_S:.0f}" in plan["runs"]["simulate_kvtester"]["arguments"]
    seen: list[float] = []

    def stop(settings: SimulationSettings, *_: Any) -> None:
        seen.append(settings.drain_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(peer_packages, "why_absent", lambda module: None)
    monkeypatch.setattr(dynamo_router, "with_dynamo", stop)
    monkeypatch.setattr(router, "simulate_all", lambda every, jobs: stop(every[0]))
    for run in (lambda: dynamo_router.main([]), lambda: main(["--only", "placement", "--built-in"])):
        with pytest.raises(KeyboardInterrupt):
            run()
    with pytest.raises(KeyboardInterrupt):
        dynamo_router.main(["--drain-s", "300"])
    assert seen == [DRAIN_S, DRAIN_S, 300.0]
