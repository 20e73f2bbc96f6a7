"""What a replica's scheduler is told of the configuration, and the cost model in it."""

from pathlib import Path
from typing import Any

import pytest

from cluster.app import engine_kwargs
from cluster.config.loader import load_config
from cluster.config.schema import CaesuraConfig, PolicyConfig
from cluster.core.errors import ConfigError
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.slo import Slo
from replicas.presets import preset
from replicas.settings import SchedulerSettings, build_policy


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "caesura.yaml"


def complaints(path: Path, text: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(path, {})
    return str(refused.value).splitlines()


def test_a_cost_model_is_a_preset_or_a_file_beside_the_configuration(file: Path, tmp_path: Path) -> None:
    assert load_config(None, {}).cost_model is None
    assert load_config(None, {}, {"cost_model": "opt-13b/h800"}).cost_model == "opt-13b/h800"
    preset("opt-13b/h800").save(tmp_path / "mine.json")
    file.write_text("cost_model: mine.json\n", encoding="utf-8")
    config = load_config(file, {})
    assert config.cost_model == str(tmp_path / "mine.json")
    assert SchedulerSettings.for_replica(config).cost == preset("opt-13b/h800")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("opt-13b", "cost_model: preset 'opt-13b': unknown device ''; choose one of: "),
        ("best/h800", "cost_model: preset 'best/h800': unknown model 'best'; choose one of: "),
        ("llama-3.1-8b/none.json", "cost_model: /"),
        ("5", "cost_model: input should be a valid string (got 5, line 1)"),
        ("true", "cost_model: must not be true or false"),
        ('""', "cost_model: string should have at least 1 character"),
    ],
)
def test_wrong_cost_models_are_told_by_their_key(file: Path, value: str, complaint: str) -> None:
    (line,) = complaints(file, f"cost_model: {value}\n")
    assert line.startswith(f"{file}: {complaint}")
    assert line.endswith("line 1)")


def test_a_cost_model_file_that_is_none_is_told_by_its_key(file: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    (line,) = complaints(file, "cost_model: ./bad.json\n")
    assert "cost_model: missing; `caesura profile` writes such files" in line
    with pytest.raises(ConfigError, match=r"^cost_model: .*bad\.json"):
        SchedulerSettings.for_replica(CaesuraConfig(cost_model=str(tmp_path / "bad.json")))


@pytest.mark.parametrize(
    ("said", "expected", "finds"),
    [
        ({}, "tiny/cpu", False),
        ({"model": {"source": "org/other"}}, "llama-3.1-8b/h100", False),
        ({"model": {"source": "org/other"}, "replicas": {"accelerator": "gpu"}}, "llama-3.1-8b/h100", True),
        ({"cost_model": "opt-13b/h200", "replicas": {"accelerator": "gpu"}}, "opt-13b/h200", False),
    ],
)
def test_without_a_cost_model_an_engine_on_a_gpu_finds_its_own(
    said: dict[str, Any], expected: str, finds: bool
) -> None:
    settings = SchedulerSettings.for_replica(CaesuraConfig.model_validate(said))
    assert (settings.cost.name, settings.finds_cost) == (expected, finds)


def test_a_replica_is_told_all_that_its_scheduler_decides_by() -> None:
    config = load_config(None, {}, {"slo.ttft_s": 0.25, "limits.max_pin_s": 7, "policy.name": "mars"})
    settings = SchedulerSettings.of(engine_kwargs(config)["additional_config"])
    assert (settings.slo, settings.limits, settings.policy) == (config.slo, config.limits, config.policy)
    assert (settings.cost.name, settings.tool_parser) == ("tiny/cpu", "hermes")


def test_tenants_with_bounds_of_their_own_reach_the_scheduler() -> None:
    said = {"slo": {"ttft_s": 2.0, "e2e_s": 60.0}, "tenants": {"quick": {"slo": {"ttft_s": 0.5}}, "plain": {}}}
    found = SchedulerSettings.for_replica(CaesuraConfig.model_validate(said))
    again = SchedulerSettings.of(found.additional_config())
    assert again.bounds_of(ProgramIdentity(tenant="quick")) == Slo(0.5, e2e_s=60.0)
    assert again.bounds_of(ProgramIdentity(tenant="plain")) == Slo(2.0, e2e_s=60.0)
    hurried = ProgramIdentity(tenant="unnamed", hints=Hints(deadline_s=10.0))
    assert again.bounds_of(hurried) == Slo(2.0, e2e_s=10.0)


def node(host: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as Ray lists it."""
    return {"NodeManagerHostname": host, "Alive": alive, "Resources": resources}


CPU_NODES = [node("head", memory=1e9), node("a", CPU=4.0), node("b", CPU=4.0), node("c", CPU=4.0, alive=False)]
GPU_NODES = [
    node("a", CPU=4.0),
    node("b", CPU=4.0, GPU=1.0),
    node("c", CPU=4.0, GPU=1.0, **{"accelerator_type:L4": 1.0}),
]


@pytest.mark.parametrize(
    ("nodes", "replicas", "here"),
    [
        (CPU_NODES, {"count": 6}, 3),
        ([*CPU_NODES, node("a", CPU=4.0)], {"count": 6}, 3),
        (CPU_NODES[:1], {"count": 6}, 6),
        (GPU_NODES, {"count": 6, "accelerator": "gpu"}, 3),
        (GPU_NODES, {"count": 6, "accelerator": "gpu", "accelerator_type": "L4"}, 6),
    ],
)
def test_replicas_share_only_the_machines_that_can_have_one(
    nodes: list[dict[str, Any]], replicas: dict[str, Any], here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.app.ray.is_initialized", lambda: True)
    monkeypatch.setattr("cluster.app.ray.nodes", lambda: nodes)
    arguments = engine_kwargs(CaesuraConfig.model_validate({"replicas": replicas}))
    assert arguments["kv_transfer_config"]["kv_connector_extra_config"]["replicas_here"] == here


@pytest.mark.parametrize(
    ("mixed", "evicts_ends", "meets_requests"),
    [
        ({"name": "caesura"}, True, True),
        ({"name": "caesura", "pause": "continuum"}, False, True),
        ({"name": "continuum", "pause": "caesura"}, True, True),
        ({"name": "caesura", "pause": "vllm"}, False, False),
        ({"name": "vllm", "order": "caesura"}, False, False),
    ],
)
def test_what_becomes_of_holds_is_the_pause_policys(
    mixed: dict[str, Any], evicts_ends: bool, meets_requests: bool
) -> None:
    built = build_policy(PolicyConfig(**mixed))
    assert (built.evicts_ends, built.meets_requests) == (evicts_ends, meets_requests)
    assert built.single_flight == (built.preemption is not None) == (mixed["name"] == "caesura")
