"""`caesura profile`: the fit on made-up times, and the whole command on the real engine."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.core.clock import ManualClock
from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel
from replicas.presets import preset
from replicas.profile import StepSample, _Window, fit_steps


def samples_of(seconds: Callable[[StepSample], float]) -> list[StepSample]:
    """The grid that `caesura profile` measures, with times by ``seconds``."""
    grid = [
        StepSample(new, new + cached, 1, new * cached + new * (new + 1) / 2, 0.0, requests=1)
        for new, cached in product((1, 16, 64, 128, 256, 512, 1024, 2048), (0, 512, 4096))
    ]
    grid += [
        StepSample(batch, batch * context, batch, batch * context, 0.0)
        for batch, context in product((1, 4, 16, 64, 256), (32, 512, 4096))
    ]
    return [StepSample(s.tokens, s.context, s.sequences, s.pairs, seconds(s), s.requests) for s in grid]


@pytest.mark.parametrize("name", ["opt-13b/h800", "llama-3.1-8b/a100-40"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_fit_finds_the_model_that_made_the_times(name: str, noise: float) -> None:
    truth, random = preset(name), np.random.default_rng(1)

    def seconds(s: StepSample) -> float:
        exact_s = truth.step_s(s.tokens, s.context, s.sequences, s.pairs) + s.requests * 5e-4
        return exact_s * float(random.normal(1.0, noise))

    found = fit_steps(samples_of(seconds))
    # The crossing is searched on a grid: a few per cent are lost there.
    assert found.mean_error < 0.03 + noise
    assert found.token_s == pytest.approx(truth.token_s, rel=0.1)
    model = found.cost_model("found", kv_bytes_per_token=1.0, kv_capacity_tokens=1, swap_token_s=1.0)
    for tokens, context, sequences in ((700, 3000, 1), (40, 50_000, 40), (300, 30_000, 30)):
        predicted_s = model.step_s(tokens, context, sequences)
        assert predicted_s == pytest.approx(truth.step_s(tokens, context, sequences), rel=0.15)
    assert model.saturation_tokens == pytest.approx(truth.saturation_tokens, rel=0.25)


def test_a_request_s_way_in_and_out_is_no_part_of_a_step() -> None:
    def seconds(s: StepSample) -> float:
        return 2e-3 + s.tokens * 1e-5 + s.requests * 7e-3

    found = fit_steps(samples_of(seconds))
    assert (found.overhead_s, found.request_s) == (pytest.approx(2e-3, rel=0.01), pytest.approx(7e-3, rel=0.01))


def test_no_coefficient_is_negative_whatever_was_measured() -> None:
    random = np.random.default_rng(2)
    found = fit_steps(samples_of(lambda s: float(1e-3 + s.tokens * 1e-6) * random.uniform(0.2, 5.0)))
    assert found.token_s > 0
    assert min(found.overhead_s, found.sequence_s, found.weights_s, found.context_s, found.pair_s) >= 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="positive time"):
        fit_steps(samples_of(lambda _: seconds))


def test_samples_that_show_no_growth_are_refused() -> None:
    for samples in ([], [StepSample(4, 40, 4, 40.0, 1.0), StepSample(4, 400, 4, 400.0, 2.0)]):
        with pytest.raises(ConfigError, match="different numbers of tokens"):
            fit_steps(samples)


def test_a_decode_window_opens_with_the_last_sequence_and_counts_its_steps() -> None:
    clock = ManualClock()
    window = _Window(batch=2, steps=3, clock=clock)
    clock.advance(5.0)
    window.count(0, 4)  # it decodes alone: not measured
    clock.advance(1.0)
    window.count(1, 1)
    for _ in range(2):
        clock.advance(2.0)
        window.count(0, 1)
        window.count(1, 1)
        assert not window.closed
    clock.advance(4.0)
    window.count(1, 2)  # its reader lagged: two steps in one
    assert window.closed
    assert window.seconds_per_step == 8.0 / 4
    assert window.generated == 5 + 2 * 4 // 2
    window.count(0, 9)
    assert window.seconds_per_step == 2.0


@pytest.mark.engine
def test_the_command_measures_the_real_engine_and_saves_what_it_found(tiny_model: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "caesura.yaml", tmp_path / "model.json"
    engine = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    replica = {"kv_cache_bytes": 8 << 20}
    config.write_text(yaml.safe_dump({"model": {"source": str(tiny_model)}, "engine": engine, "replicas": replica}))
    ran = CliRunner().invoke(app, ["profile", "--config", str(config), "--out", str(out), "--quick"])
    assert ran.exit_code == 0, ran.output
    model = CostModel.load(out)
    shape = json.loads((tiny_model / "config.json").read_text())
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    numbers = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim
    assert model.kv_bytes_per_token in (2 * numbers, 4 * numbers)  # 16- or 32-bit, as the machine's kernels take it
    assert model.kv_capacity_tokens * model.kv_bytes_per_token == pytest.approx(8 << 20, rel=0.05)
    evidence = json.loads(out.read_text())
    assert np.isfinite([evidence["fit"]["mean_error"], evidence["fit"]["max_error"]]).all()
    batches = {(s["tokens"], s["sequences"]) for s in evidence["samples"]}
    # 512 new tokens are more than a step takes, eight sequences more than the engine runs.
    assert batches == {(16, 1), (128, 1), (1, 1), (4, 4)}
    cached = {s["context"] - s["tokens"] for s in evidence["samples"] if s["requests"]}
    assert cached == {0, 256}, "the prefix cache did not hold what it was given"
    times = [model.prefill_s(n) for n in (1, 10, 100, 1000, 10_000)]
    assert times == sorted(times)
    assert times[0] > 0
    assert model.swap_s(1000) > model.swap_s(10) > 0
    assert "fitted, ms" in ran.output
    assert "KV memory" in ran.output


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "no" / "model.json")])
    assert isinstance(ran.exception, ConfigError)
    assert "there is no folder" in str(ran.exception)


def test_a_folder_in_place_of_the_file_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["profile", "--out", str(tmp_path), "--config", str(tmp_path / "none.yaml")])
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception) == f"--out {tmp_path}: it is a folder; name a file in it"


def test_a_cost_model_is_fitted_to_public_measurements(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    ran = CliRunner().invoke(app, ["profile", "--from-silicon", "opt-13b/h800x2", "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert CostModel.load(out) == preset("opt-13b/h800x2")
    content = json.loads(out.read_text())
    assert content["device"] == "h100"
    assert {source["licence"] for source in content["sources"]} == {"Apache-2.0", "CC-BY-4.0", "MIT"}
    assert content["measurements_retrieved"] and content["efficiency"]
    assert {errors["phase"] for errors in content["held_out_errors"]} >= {"decode", "prefill", "mixed"}
    assert "layers_without_attention" in ran.output
    assert "KV memory" in ran.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["opt-13b/v100"], "unknown device 'v100'"),
        (["opt-13b/rtx-4090"], "does not fit"),
        (["opt-13b/h800", "--quick"], "--from-silicon: no engine is measured"),
        (["opt-13b/h800", "--set", "model.id=x"], "--from-silicon: no engine is measured"),
    ],
)
def test_measurements_of_nothing_are_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    ran = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "model.json"), "--from-silicon", *arguments])
    assert isinstance(ran.exception, ConfigError)
    assert why in str(ran.exception)
    assert not (tmp_path / "model.json").exists()
