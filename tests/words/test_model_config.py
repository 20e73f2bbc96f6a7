"""Several models and the classes that lead to them: what the configuration takes, refuses and hands to each model."""

from pathlib import Path

import pytest

from cluster.config.loader import load_config
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError

WRONG: dict[str, tuple[str, str]] = {
    "first model among the others": (
        "models: {tiny: {}}\n",
        "models: 'tiny' is the name of the first model (model.id)",
    ),
    "model named as a class": ("models: {'auto:x': {}}\n", "models.auto:x: begins with 'auto:', which names a class"),
    "key of a further model": (
        "models:\n  big:\n    replicas: {cont: 3}\n",
        "models.big.replicas.cont: unknown key; did you mean models.big.replicas.count? (got 3, line 3)",
    ),
    "reserved argument of a further model": (
        "models: {big: {engine: {model: x}}}\n",
        "models.big.engine.model: is decided by model.source; set that instead",
    ),
    "cost model of a further model": (
        "models: {big: {cost_model: nix}}\n",
        "models.big.cost_model: preset 'nix': unknown model 'nix'",
    ),
    "key of a rule": (
        "model_routing: {a: [{model: tiny, tool: x}]}\n",
        "model_routing.a.0.tool: unknown key; did you mean model_routing.a.0.tools?",
    ),
    "rule to a model that is not served": (
        "model_routing: {a: [{model: big}]}\n",
        "model_routing: a: no model 'big' is served; there are: tiny",
    ),
    "class without a last resort": (
        "model_routing: {a: [{model: tiny, tools: [x]}]}\n",
        "model_routing: a: the last rule must name a model and no condition",
    ),
    "class without rules": (
        "model_routing: {a: []}\n",
        "model_routing: a: the last rule must name a model and no condition",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_keys_are_told_with_their_path(tmp_path: Path, case: str) -> None:
    text, complaint = WRONG[case]
    file = tmp_path / "caesura.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(file, {})
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{file}: {complaint}")


def test_each_model_sees_the_configuration_as_its_own(tmp_path: Path) -> None:
    file = tmp_path / "caesura.yaml"
    file.write_text(
        "model: {id: small}\nengine: {max_num_seqs: 4}\n"
        "models: {big: {source: ./weights, replicas: {count: 3}, cost_model: opt-13b/h800, tool_parser: null}}\n",
        encoding="utf-8",
    )
    (file.parent / "weights").mkdir()
    config = load_config(file, {})
    small, big = config.served.values()
    assert small.model == config.model
    assert (small.engine, small.replicas, small.cost_model) == (config.engine, config.replicas, None)
    assert (big.model.id, big.model.source, big.model.tool_parser) == ("big", str(file.parent / "weights"), None)
    assert (big.engine, big.replicas.count, big.cost_model) == ({}, 3, "opt-13b/h800")
    assert big.served.keys() == config.served.keys()
    assert config.num_replicas == big.num_replicas == 4


def test_bounds_of_an_elastic_model() -> None:
    """Given as `{min, max}`; memory and CPUs are shared out for the largest number."""
    config = CaesuraConfig.model_validate(
        {"replicas": {"min": 0, "max": 3}, "models": {"big": {"replicas": {"max": 4}}}}
    )
    first, big = (own.replicas for own in config.served.values())
    assert (first.is_elastic, first.least, first.most) == (True, 0, 3)
    assert (big.is_elastic, big.least, big.most) == (True, 1, 4)
    assert config.num_replicas == 7
    assert CaesuraConfig.model_validate(config.model_dump()) == config, "what is written can be read"
    fixed = CaesuraConfig.model_validate({"replicas": {"count": 2}}).replicas
    assert (fixed.is_elastic, fixed.least, fixed.most) == (False, 2, 2)
