"""What the deviations from the papers change: which runs are made, and the table of a page."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import deviations
from benchmarks.deviations import PLAN, Variant, table_of, variants_of
from cluster.offline.simulator.settings import SimulationSettings

ALL: dict[str, Any] = yaml.safe_load(PLAN.read_text())


def test_the_policy_as_it_is_here_runs_on_every_engine_on_which_a_row_runs() -> None:
    rows = [
        {"what": "a", "parameters": {"x": 1}},
        {"what": "b", "on": {"host_gib": 64}, "policy": "other"},
        {"what": "c", "on": {"host_gib": 64}, "settings": {"disk_gib": 9}},
    ]
    assert list(variants_of("lamps", {"settings": {"minutes": 5}, "rows": rows})) == [
        Variant("as here", "lamps", {}, {"minutes": 5}),
        Variant("a", "lamps", {"x": 1}, {"minutes": 5}),
        Variant("as here, host_gib: 64", "lamps", {}, {"minutes": 5, "host_gib": 64}),
        Variant("b", "other", {}, {"minutes": 5, "host_gib": 64}),
        Variant("c", "lamps", {}, {"minutes": 5, "host_gib": 64, "disk_gib": 9}),
    ]


@pytest.mark.parametrize("paper", ALL["papers"])
def test_every_row_can_be_simulated(paper: str) -> None:
    for variant in variants_of(paper, ALL["papers"][paper]):
        given = {key: value for key, value in variant.settings.items() if key != "trace"}
        parameters = {variant.policy: dict(variant.parameters)} if variant.parameters else {}
        settings = SimulationSettings(policies=(variant.policy,), rates_per_s=(1.0,), parameters=parameters, **given)
        assert settings.scheduler(variant.policy) is not None


def test_the_table_has_a_row_for_each_variant_and_two_columns_for_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"paper": "lamps", "what": what, "share": share, "good_per_s": good, "completion_s": 10 * good}
        for what, goods in (("as here", (3.0, 2.0)), ("ranked in each step", (3.5, 2.5)))
        for share, good in zip((0.9, 1.1), goods, strict=True)
    ]
    monkeypatch.setattr(deviations, "kept_rows", lambda name: rows)
    assert table_of("lamps")[-4:] == [
        "| | good/s at 0.9 | completion, s at 0.9 | good/s at 1.1 | completion, s at 1.1 |",
        "| --- | --- | --- | --- | --- |",
        "| as here | 3.00 | 30.0 | 2.00 | 20.0 |",
        "| ranked in each step | 3.50 | 35.0 | 2.50 | 25.0 |",
    ]
    assert table_of("mars") == []


def test_a_paper_that_is_not_planned_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["deviations", "--traces", str(Path()), "--papers", "lamps,orca"])
    with pytest.raises(SystemExit):
        deviations.main()
    assert "--papers orca: there are infercept" in capsys.readouterr().err
