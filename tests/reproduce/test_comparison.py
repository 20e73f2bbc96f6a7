"""Rows of a comparison: values, ratios, reductions and sustained loads, of given measures."""

import pytest

from cluster.core.errors import ConfigError
from cluster.offline.reproduce.comparison import Results, compare, load_at, sustained
from cluster.offline.reproduce.plan import PAPERS, Factor, Figure, Job, check, jobs_of, paper_of
from cluster.offline.reproduce.report import as_json, summary
from cluster.offline.reproduce.running import Measured, settings_of

FIGURE = {
    "title": "a figure",
    "settings": {"minutes": 1},
    "systems": {"old": {"policy": "vllm"}, "new": {"policy": "mars", "parameters": {"refresh_steps": 5}}},
    "loads": {"1": {"rate": 1, "quick": True}, "2": {"rate": 2, "settings": {"minutes": 2}}},
    "measures": {"latency": "latency_s.mean"},
    "factors": {"slow": {"what": "slower", "settings": {"slower": 1.5}, "parameters": {"new": {"refresh_steps": 9}}}},
    "rows": [],
}
LATENCY = {"old": {"1": 10.0, "2": 40.0}, "new": {"1": 8.0, "2": 16.0}}


def figure(*rows: dict[str, object]) -> Figure:
    return Figure.model_validate(FIGURE | {"rows": [{"what": "row", "measure": "latency", **row} for row in rows]})


def results(*seeds: int, factor: str = "", times: float = 1.0) -> Results:
    return Results(
        Measured(Job("f", system, load, seed, factor), {"latency": times * value + seed}, 1, 1)
        for system, loads in LATENCY.items()
        for load, value in loads.items()
        for seed in seeds
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"system": "new", "load": "2"}, 16.0),
        ({"kind": "ratio", "system": "old", "against": "new", "load": "1"}, 1.25),
        ({"kind": "ratio", "system": "old", "against": "new"}, 2.5),
        ({"kind": "mean_ratio", "system": "old", "against": "new"}, (1.25 + 2.5) / 2),
        ({"kind": "least", "system": "old", "against": "new"}, 1.25),
        ({"kind": "less", "system": "new", "against": "old", "load": "2"}, 60.0),
        # `old` reaches 16 s at 1.2 a second, and `new` at 2 a second. At lower levels they are closer.
        ({"kind": "sustained", "system": "new", "against": "old"}, 2 / 1.2),
    ],
)
def test_a_row_is_computed_from_the_measures(row: dict[str, object], expected: float) -> None:
    plan = figure({**row, "published": 2 * expected})
    [found] = compare("f", plan, results(0))
    assert found.here == pytest.approx(expected, rel=0.01)
    assert (found.ratio, found.near, found.spread) == (pytest.approx(0.5, rel=0.01), False, None)


def test_a_row_is_near_within_a_quarter_of_the_published_number() -> None:
    plan = figure(*({"system": "new", "load": "2", "published": value} for value in (12.7, 12.9, 21.3, 21.4)))
    assert [row.near for row in compare("f", plan, results(0))] == [False, True, True, False]
    assert "2 of 4" in summary(compare("f", plan, results(0)))


@pytest.mark.parametrize(
    ("published", "near", "by_rest"),
    [(60.0, True, True), (72.0, True, False), (50.0, True, True), (40.0, False, False), (-5.0, False, False)],
)
def test_a_reduction_is_also_compared_by_what_it_leaves(published: float, near: bool, by_rest: bool) -> None:
    """Here 60% below, which leaves 40%: between 32 and 50% are within a quarter of that."""
    plan = figure({"kind": "less", "system": "new", "against": "old", "load": "2", "published": published})
    [found] = compare("f", plan, results(0))
    assert (found.near, found.near_by_rest) == (near, by_rest)
    assert f"by what it leaves, {int(by_rest)} are" in summary([found])


def test_several_seeds_have_a_mean_and_a_spread() -> None:
    [found] = compare("f", figure({"system": "new", "load": "1", "published": 8}), results(0, 2))
    assert (found.here, found.spread) == (9.0, pytest.approx(2**0.5))


def test_an_extreme_is_one_of_the_means_over_seeds_with_and_without_a_factor() -> None:
    """`old` takes (8, 24) s at the two loads with seed 0, (24, 8) s with seed 1; `new` 8 s: the ratios are 2 and 2."""
    row = {"kind": "ratio", "system": "old", "against": "new", "published": 2}
    runs = [
        Measured(Job("f", system, load, seed, factor), {"latency": value}, 1, 1)
        for factor in ("", "slow")
        for seed, values in ((0, (8.0, 24.0)), (1, (24.0, 8.0)))
        for load, own in zip(("1", "2"), values, strict=True)
        for system, value in (("old", own), ("new", 8.0))
    ]
    [found] = compare("f", figure(row), Results(runs))
    assert (found.here, found.spread, found.with_factors) == (2.0, 0.0, {"slow": 2.0})


def test_a_row_that_is_undefined_stays_and_is_not_near() -> None:
    """No program of `new` completed at load 1; its ratio at load 2 alone would be another number."""
    rows = [{"system": "new", "load": "1", "published": 8}]
    undefined = Measured(Job("f", "new", "1", 0), {"latency": None}, 1, 1)
    [found] = compare("f", figure(*rows), Results([undefined]))
    assert (found.here, found.near) == (None, False)
    assert "0 of 1" in summary([found])


@pytest.mark.parametrize("kind", ["ratio", "mean_ratio", "least", "less"])
def test_a_baseline_of_zero_at_one_load_makes_the_ratio_undefined(kind: str) -> None:
    runs = [
        Measured(Job("f", system, load, 0), {"latency": value}, 1, 1)
        for system, load, value in (("new", "1", 1.0), ("new", "2", 2.0), ("old", "1", 1.0), ("old", "2", 0.0))
    ]
    row = {"kind": kind, "system": "new", "against": "old", "published": 1}
    [found] = compare("f", figure(row), Results(runs))
    assert found.here is None


def test_a_load_that_was_not_run_has_no_row_and_a_factor_has_its_own_numbers() -> None:
    plan = figure(*({"system": "new", "load": load, "published": 8} for load in ("1", "2")))
    own = [Measured(Job("f", "new", "1", 0), {"latency": 9.0}, 1, 1)]
    slower = [Measured(Job("f", "new", "1", 0, "slow"), {"latency": 12.0}, 1, 1)]
    assert compare("another", plan, Results(own)) == []
    [found] = compare("f", plan, Results(own + slower))
    assert (found.here, found.with_factors) == (9.0, {"slow": 12.0})


def test_a_curve_that_never_reaches_a_level_sustains_nothing() -> None:
    assert load_at([(1, 5.0), (2, 9.0)], 7.0) == 1.5
    assert load_at([(1, 5.0), (2, 9.0)], 10.0) is None
    assert sustained([(1, 5.0), (2, 9.0)], [(1, 10.0), (2, 90.0)]) is None


def test_quick_runs_the_marked_loads_and_settings_go_from_the_figure_to_load_and_system() -> None:
    plan = {"f": figure()}
    quick = jobs_of(plan, (0,), quick=True, factors=())
    assert [(job.system, job.load) for job in quick] == [("old", "1"), ("new", "1")]
    whole = jobs_of(plan, (0, 1), quick=False, factors={"slow"})
    assert len(whole) == 2 * 2 * 2 * 2
    last = whole[-1]
    assert (last.factor, last.settings["slower"], last.settings["minutes"], last.settings["rate"]) == (
        "slow",
        1.5,
        2,
        2,
    )
    assert last.settings["parameters"] == {"refresh_steps": 9}
    own = {job.system: job.settings["parameters"] for job in whole if not job.factor}
    assert own == {"old": {}, "new": {"refresh_steps": 5}}


@pytest.mark.parametrize("name", PAPERS)
def test_every_plan_can_be_run_and_has_headlines(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = paper_of(name)
    traces = tmp_path_factory.mktemp("traces")
    for trace in ("infercept_merge", "liveswe_gpt5mini"):
        (traces / f"{trace}.jsonl.gz").write_bytes(EMPTY_GZIP)
    factors = {key for one in plan.figures.values() for key in one.factors}
    for job in jobs_of(plan.figures, (0,), quick=False, factors=factors):
        settings, cost = settings_of(job, traces, traces)
        assert settings.policies == (plan.figures[job.figure].systems[job.system].policy,)
        assert cost.kv_capacity_tokens > 0
    assert any(row.headline for one in plan.figures.values() for row in one.rows)
    assert jobs_of(plan.figures, (0,), quick=True, factors=())


EMPTY_GZIP = bytes.fromhex("1f8b08000000000000ff03000000000000000000")


def test_a_factor_that_names_no_system_is_refused() -> None:
    wrong = Figure.model_validate(FIGURE | {"factors": {"slow": {"what": "slower", "parameters": {"other": {}}}}})
    with pytest.raises(ConfigError, match="factor slow: there is no system other"):
        check("f", wrong)


def test_a_factor_of_one_system_runs_that_system_only_and_the_others_keep_their_numbers() -> None:
    factor = {"what": "new on slower steps", "systems": ["new"], "settings": {"slower": 2.0}}
    rows = [{"kind": "ratio", "system": "new", "against": "old", "load": "1", "published": 1}]
    plan = Figure.model_validate(FIGURE | {"rows": [row | {"what": "a", "measure": "latency"} for row in rows]})
    plan = plan.model_copy(update={"factors": {"slow": Factor.model_validate(factor)}})
    changed = [job for job in jobs_of({"f": plan}, (0,), quick=True, factors={"slow"}) if job.factor]
    assert [(job.system, job.settings["slower"]) for job in changed] == [("new", 2.0)]
    runs = [
        Measured(Job("f", system, "1", 0, factor), {"latency": value}, 1, 1)
        for system, factor, value in (("old", "", 2.0), ("new", "", 6.0), ("new", "slow", 8.0))
    ]
    [found] = compare("f", plan, Results(runs))
    assert (found.here, found.with_factors) == (3.0, {"slow": 4.0})
    wrong = plan.model_copy(update={"factors": {"slow": Factor.model_validate(factor | {"systems": ["other"]})}})
    with pytest.raises(ConfigError, match="factor slow: there is no system other"):
        check("f", wrong)


def test_a_row_that_names_nothing_of_its_figure_is_refused() -> None:
    for row, complaint in (
        ({"system": "nobody", "load": "1", "published": 1}, "system: there is no 'nobody'"),
        ({"system": "new", "load": "9", "published": 1}, "load: there is no '9'"),
        ({"system": "new", "published": 1}, "value needs"),
        ({"system": "new", "kind": "ratio", "load": "1", "published": 1}, "ratio needs"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check("plan", figure(row))


def test_the_json_has_the_rows_and_the_curves() -> None:
    plan = figure({"system": "new", "load": "2", "published": 8})
    rows = compare("f", plan, results(0))
    paper = paper_of("lamps").model_copy(update={"figures": {"f": plan}})
    content = as_json("lamps", paper, rows, results(0), {"command": "caesura reproduce lamps"})
    assert content["rows"][0]["ratio"] == 2.0
    assert content["curves"]["f"]["latency"]["old"] == [(1, 10.0), (2, 40.0)]
