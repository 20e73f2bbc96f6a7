"""The fits of the presets to public measurements: their files, their errors, and the rows behind them."""

import csv
import gzip
import io
from dataclasses import replace

import pytest

from cluster.core.errors import ConfigError
from replicas.presets import DEVICES, FITS, MEMORY_UTILIZATION, MODELS, OLD_ENGINES, WORKING_BYTES, efficiency, fit_file
from replicas.silicon.fit import FIT_NAMES, Errors, fit_device
from replicas.silicon.measurements import FILE, SOURCES, Measurement, cost_of, load, predicted_s

ROWS = load()
FITTED = {name: fit_device(name, ROWS) for name in FIT_NAMES}
MUST = [
    (device, model) for device in ("a100-80", "h100", "h200", "b200") for model in ("llama-3.1-8b", "llama-3.1-70b")
]
MUST += [(device, model) for device in ("a100-80", "h100") for model in ("opt-13b", "vicuna-13b")]


def row(**changed: object) -> Measurement:
    base = Measurement("aic", "h100", "llama-3.1-8b", 1, "decode", 4.0, 4.0, 1000.0, 0.01, "vllm", "")
    return replace(base, **changed)  # type: ignore[arg-type]


def test_every_device_and_every_engine_of_the_past_has_a_fit() -> None:
    assert {device.measured_on for device in DEVICES.values()} | {f"engine-{name}" for name in OLD_ENGINES} == set(
        FIT_NAMES
    )
    assert {path.stem for path in FITS.glob("*.json")} == set(FIT_NAMES)


@pytest.mark.parametrize("name", FIT_NAMES)
def test_the_file_of_a_fit_is_what_the_fit_gives(name: str) -> None:
    fit, content = FITTED[name], fit_file(name)
    for field in ("compute", "attention", "bandwidth", "link", "layer_s", "layer_sequence_s", "all_reduce_s"):
        assert getattr(efficiency(name), field) == pytest.approx(getattr(fit.reached, field), rel=2e-3)
    made = fit.content()
    for errors, expected in zip(content.pop("held_out_errors"), made.pop("held_out_errors"), strict=True):
        for key, value in expected.items():
            assert errors[key] == (pytest.approx(value, abs=3e-3) if isinstance(value, float) else value)
    assert content.pop("efficiency").keys() == made.pop("efficiency").keys()
    assert content == made
    assert all(source["licence"] and source["address"] for source in content["sources"])


@pytest.mark.parametrize(("device", "model"), MUST)
def test_steps_that_were_not_fitted_are_predicted_to_ten_percent(device: str, model: str) -> None:
    ranks = MODELS[model].tensor_parallel
    errors = {
        group.phase: found
        for group, found in FITTED[device].errors().items()
        if (group.source, group.device, group.model, group.ranks) == ("aic", device, model, ranks)
    }
    assert {"decode", "prefill"} <= errors.keys()
    for found in errors.values():
        assert found.rows >= 6
        assert found.error <= 0.1
        assert 0.75 <= found.p10 <= found.p90 <= 1.25


def test_a_source_that_was_not_fitted_is_predicted_too() -> None:
    found = {(*group[:3], *group[3:5]): errors for group, errors in FITTED["h100"].errors().items()}
    served = found["aic-served", "tensorrt-llm 1.0.0rc3", "h100", "llama-3.1-8b", 1]
    assert served.rows == 42
    assert served.error <= 0.1
    layers = found["vidur", "vidur kernels", "h100", "llama-3.1-70b", 4]
    assert layers.error <= 0.1


@pytest.mark.parametrize("name", FIT_NAMES)
def test_no_row_is_both_fitted_and_held_out(name: str) -> None:
    fit = FITTED[name]
    assert fit.fitted and fit.held_out
    assert not set(fit.fitted) & set(fit.held_out)
    assert {one.kind for one in fit.fitted} == {"decode", "prefill"}
    assert len({one.source for one in fit.fitted}) == 1


def test_the_memory_that_engines_reported_is_what_a_preset_computes() -> None:
    with (FITS / "kv_capacity.csv").open(newline="") as file:
        reported = list(csv.DictReader(file))
    ratios = []
    for engine in reported:
        device, ranks = DEVICES[engine["gpu"]], int(engine["tp"])
        usable = ranks * (device.memory_bytes * float(engine["gpu_memory_utilization"]) - WORKING_BYTES)
        tokens = (usable - float(engine["weight_bytes"])) / float(engine["kv_bytes_per_token"])
        ratios.append(tokens / float(engine["kv_tokens"]))
    assert len(ratios) == 6
    assert all(0.97 < ratio < 1.04 for ratio in ratios), ratios
    assert MEMORY_UTILIZATION == 0.92


def test_the_work_of_a_row() -> None:
    assert row().work == (4, 4000, 4, 4000)
    chunk = row(kind="prefill", tokens=100.0, batch=1.0, context=50.0)
    assert chunk.work == (100, 150, 1, 100 * 50 + 100 * 101 / 2)
    two = row(kind="prefill", tokens=200.0, batch=2.0, context=0.0)
    assert two.work == (200, 200, 2, 2 * 100 * 101 / 2)
    mixed = row(kind="mixed", tokens=108.0, batch=9.0, context=50.0, note="8x1000")
    assert mixed.work == (108, 150 + 8000, 9, 100 * 50 + 100 * 101 / 2 + 8000)


def test_a_served_row_is_decodes_and_the_prompts_of_the_others() -> None:
    """Of 4 clients, 3 others end once while one generates 10 tokens: 0.3 prompts beside each of its decodes."""
    served = row(kind="served", context=1000.0, note="output=10")
    cost = cost_of(served, efficiency("h100"))
    decode_s = cost.step_s(4, 4 * 1005, 4, 4 * 1005)
    beside_s = cost.step_s(1004, 4 * 1005 + 1000, 5, 4 * 1005 + 1000**2 / 2)
    assert predicted_s(served, efficiency("h100")) == pytest.approx(decode_s + 0.3 * (beside_s - decode_s))


def test_errors_are_summarized() -> None:
    errors = Errors.of([0.9, 1.0, 1.2])
    assert (errors.rows, errors.ratio, errors.error) == (3, 1.0, 0.1)
    assert (errors.p10, errors.p90) == (0.92, 1.16)


def test_a_device_that_nobody_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="no steps were measured on 'h800'; choose one of: rtx-4090, a100-80"):
        fit_device("h800", ROWS)


def test_measurements_are_complete_and_a_wrong_line_is_named() -> None:
    assert len(ROWS) == 1865
    assert {one.source for one in ROWS} == SOURCES.keys()
    text = gzip.decompress(FILE.read_bytes()).decode()
    broken = text.splitlines()[:3]
    broken[2] = broken[2].replace("12.01", "soon")
    with pytest.raises(ConfigError, match="measurements, line 3: could not convert"):
        load(io.StringIO("\n".join(broken)))
