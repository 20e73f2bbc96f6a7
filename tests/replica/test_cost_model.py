"""The cost model's form, its file, and the presets."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.errors import ConfigError
from replicas.cost_model import FILE_KEY, CostModel
from replicas.presets import DEVICES, MODELS, preset, preset_names

PRESETS_WITH_LIMITS = {
    "llama-3.1-8b/a100-80": (2048, 256),
    "llama-3.1-8b/h100": (8192, 1024),
    "llama-3.1-8b/b200": (16384, 1024),
    "llama-3.1-8b/h100@2023": (2048, 256),
}
"""Tokens and sequences of a step by `get_batch_defaults` of vLLM 0.29's server."""
seconds = st.floats(0, 1e-2, allow_subnormal=False)
models = st.builds(
    CostModel,
    name=st.just("any"),
    kv_bytes_per_token=st.just(1000.0),
    kv_capacity_tokens=st.just(10_000),
    overhead_s=seconds,
    sequence_s=seconds,
    weights_s=seconds,
    token_s=st.floats(1e-7, 1e-4),
    context_s=st.floats(0, 1e-6, allow_subnormal=False),
    pair_s=st.floats(0, 1e-7, allow_subnormal=False),
    swap_token_s=st.floats(1e-7, 1e-4),
    swap_overhead_s=seconds,
)
lengths = st.integers(0, 20_000)
HAND = CostModel(
    name="hand",
    kv_bytes_per_token=1000,
    kv_capacity_tokens=10_000,
    overhead_s=1.0,
    sequence_s=0.5,
    weights_s=10.0,
    token_s=0.1,
    context_s=0.01,
    pair_s=0.001,
    swap_token_s=0.02,
    swap_overhead_s=0.3,
)
"""Numbers that one can add up in the head."""


@pytest.mark.parametrize(
    ("tokens", "context", "sequences", "expected_s"),
    [
        (4, 400, 4, 1 + 2 + 10 + 4 + 0.4),  # decode: weights, then reading 400 tokens and attending to them
        (200, 200, 1, 1 + 0.5 + 20 + 2 + 20.1),  # a prompt: computing, on 200 · 201 / 2 pairs
        (50, 1050, 1, 1 + 0.5 + 10 + 10.5 + (50 * 1000 + 50 * 51 / 2) * 0.001),  # a chunk after 1,000 tokens
        (0, 0, 0, 1),  # a step of nothing is a step
        (4, 0, 4, 1 + 2 + 10 + 0.04 + 0.004),  # the new tokens' own KV is always read
    ],
)
def test_a_step_adds_up(tokens: int, context: int, sequences: int, expected_s: float) -> None:
    assert HAND.step_s(tokens, context, sequences) == pytest.approx(expected_s)


def test_pairs_that_are_known_replace_the_assumption_that_all_sequences_are_alike() -> None:
    # 100 decodes at 10,000 tokens beside a prompt of 1,000: few of the new tokens attend to much.
    true_pairs = 100 * 10_000 + 1000 * 1001 / 2
    exact_s, assumed_s = HAND.step_s(1100, 1_001_000, 101, true_pairs), HAND.step_s(1100, 1_001_000, 101)
    assert exact_s < assumed_s
    assert exact_s == pytest.approx(1 + 50.5 + 110 + 10_010 + 1500.5)  # reading the KV, and computing on the pairs


def test_the_decode_step_is_a_step_of_one_token_each() -> None:
    assert HAND.decode_step_s(8, 4000) == HAND.step_s(8, 4000, 8)
    assert HAND.decode_step_s() == HAND.step_s(1, 1, 1)


@given(models, st.integers(1, 5000), st.integers(1, 5000), lengths, st.integers(1, 256))
def test_no_step_gets_shorter_with_more_tokens_or_context(
    model: CostModel, tokens: int, more: int, context: int, sequences: int
) -> None:
    base = model.step_s(tokens, tokens + context, sequences)
    rounding = 1 + 1e-12
    assert 0 < base <= model.step_s(tokens + more, tokens + more + context, sequences) * rounding
    assert base <= model.step_s(tokens + more, tokens + context, sequences) * rounding
    assert base <= model.step_s(tokens, tokens + context + more, sequences) * rounding
    pairs = tokens * (context + 1.0)
    known = model.step_s(tokens, tokens + context, sequences, pairs)
    assert known <= model.step_s(tokens, tokens + context, sequences + more, pairs) * rounding


@given(models, st.integers(0, 6000), lengths, st.integers(1, 3000))
def test_a_chunked_prefill_is_the_sum_of_its_steps(model: CostModel, tokens: int, context: int, chunk: int) -> None:
    total_s, done = 0.0, 0
    while done < tokens:
        new = min(chunk, tokens - done)
        done += new
        total_s += model.step_s(new, context + done, 1)
    assert model.prefill_s(tokens, context, chunk) == pytest.approx(total_s, rel=1e-9)


@given(models, st.integers(1, 6000), st.integers(0, 6000), lengths)
def test_a_prefill_grows_with_what_is_to_compute_and_with_what_is_there(
    model: CostModel, tokens: int, more: int, context: int
) -> None:
    base = model.prefill_s(tokens, context)
    assert base <= model.prefill_s(tokens + more, context) * (1 + 1e-12)
    assert base <= model.prefill_s(tokens, context + more) * (1 + 1e-12)


@given(models, lengths, lengths)
def test_swaps_cost_by_the_token_and_once_by_the_transfer(model: CostModel, first: int, second: int) -> None:
    together = model.swap_s(first + second)
    both_overheads = model.swap_overhead_s * (first > 0 and second > 0)
    assert model.swap_s(first) + model.swap_s(second) == pytest.approx(together + both_overheads)
    assert model.swap_s(0) == 0


@pytest.mark.parametrize("name", list(preset_names()))
def test_beyond_the_saturation_point_a_step_only_gets_longer(name: str) -> None:
    model = preset(name)
    knee = model.saturation_tokens

    def linear_s(tokens: int) -> float:
        return model.step_s(tokens, 100_000, 1, pairs=0.0)

    assert linear_s(1) == linear_s(knee - 1)
    assert linear_s(knee + 1) > linear_s(knee) >= linear_s(knee - 1)
    assert model.weights_s == pytest.approx(knee * model.token_s, rel=1 / knee)


@pytest.mark.parametrize(
    ("model", "kv_bytes"),
    [
        ("opt-13b", 2 * 40 * 5120 * 2),
        ("vicuna-13b", 2 * 40 * 5120 * 2),
        ("gpt-j-6b", 2 * 28 * 4096 * 2),
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),  # 8 of 32 heads have keys and values
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),
        ("qwen3-32b", 2 * 64 * 8 * 128 * 2),
    ],
)
def test_kv_bytes_of_known_shapes(model: str, kv_bytes: int) -> None:
    assert MODELS[model].kv_bytes_per_token == kv_bytes == preset(f"{model}/b200").kv_bytes_per_token


def test_what_the_papers_settings_come_to() -> None:
    opt, llama = preset("opt-13b/h800"), preset("llama-3.1-8b/a100-40")
    # What vLLM 0.29 leaves to the KV: 92% of the memory without the weights and its working memory.
    assert opt.kv_capacity_tokens == pytest.approx(62_400, rel=0.005)
    assert llama.kv_capacity_tokens == pytest.approx(164_400, rel=0.005)
    # Filling the memory once takes the computing of as many tokens, at the efficiency that was measured.
    assert opt.refill_s == pytest.approx(2.2, rel=0.03)
    assert llama.refill_s == pytest.approx(9.7, rel=0.03)
    # A decode step of OPT-13B reads 25.7 GB of weights: over 7.7 ms at the data sheet's 3.35 TB/s, under 15.
    assert 0.0077 < opt.decode_step_s() < 0.015
    # Where the KV is restored over PCIe 5 that is some three times cheaper than to compute it again.
    assert 2 < opt.prefill_s(2000) / opt.swap_s(2000) < 5


def test_an_engine_of_the_papers_time_is_slower_on_the_same_memory() -> None:
    today, then = preset("opt-13b/h800"), preset("opt-13b/h800@2023")
    assert (then.name, then.kv_capacity_tokens) == ("opt-13b/h800@2023", today.kv_capacity_tokens)
    # DistServe's measured steps of vLLM 0.2.3 are 1.9 times today's.
    assert then.decode_step_s(64, 20_000) > 1.8 * today.decode_step_s(64, 20_000)
    assert then.prefill_s(2000) > today.prefill_s(2000)
    assert then.swap_s(2000) == today.swap_s(2000)


def test_ranks_share_work_and_memory_and_pay_for_all_reduces() -> None:
    one, two = preset("llama-3.1-8b/h100"), preset("llama-3.1-8b/h100x2")
    assert preset("llama-3.1-8b/h100x1") == replace(one, name="llama-3.1-8b/h100x1")
    assert two.kv_capacity_tokens > 2 * one.kv_capacity_tokens
    assert two.weights_s == pytest.approx(one.weights_s / 2)
    assert two.overhead_s > one.overhead_s
    assert one.token_s / 2 < two.token_s < one.token_s


def test_a_step_of_a_device_has_the_limits_of_its_engine() -> None:
    limits = {name: (preset(name).step_tokens, preset(name).step_sequences) for name in PRESETS_WITH_LIMITS}
    assert limits == PRESETS_WITH_LIMITS


def test_presets_are_all_pairs_that_fit() -> None:
    refused = {
        f"{model}/{device}" for model in MODELS for device in DEVICES if f"{model}/{device}" not in set(preset_names())
    }
    assert refused == {
        "opt-13b/rtx-4090",
        "vicuna-13b/rtx-4090",
        "llama-3.1-70b/rtx-4090",
        "qwen3-32b/rtx-4090",
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("opt-13b/rtx-4090", r"weights are 25\.7 GB, one device gives 21\.9 GB .* room for 0 tokens"),
        ("llama-3.1-70b/a100-40x2", r"weights are 141\.1 GB, 2 devices give 75\.4 GB"),
        ("llama-3.1-8b/h100x3", "3 ranks do not divide 8 KV heads"),
        ("llama-3.1-8b/h100x", "unknown device 'h100x'"),
        ("llama-3.1-8b/h100x0", "unknown device 'h100x0'"),
        ("opt-66b/h800", "unknown model 'opt-66b'; choose one of: opt-13b"),
        ("opt-13b/v100", "unknown device 'v100'; choose one of: rtx-4090"),
        ("opt-13b", "unknown device ''"),
        ("opt-13b/h800@1999", "unknown engine '1999'; choose one of: 2023"),
    ],
)
def test_what_is_unknown_or_does_not_fit_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        preset(name)


def test_a_model_survives_its_file_and_its_journeys(tmp_path: Path) -> None:
    model, file = preset("gpt-j-6b/a100-80"), tmp_path / "model.json"
    model.save(file, {"samples": [1, 2]})
    assert CostModel.load(file) == model == pickle.loads(pickle.dumps(model))
    assert json.loads(file.read_text())["samples"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not valid JSON"),
        ("[]", "cost_model: missing"),
        ('{"samples": []}', "cost_model: missing"),
        ('{"cost_model": {"name": "x"}}', r"cost_model\.token_s: Field required"),
    ],
)
def test_a_file_that_holds_no_model_is_refused_by_name(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"bad.json: .*{why}"):
        CostModel.load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        CostModel.load(tmp_path / "absent.json")


@pytest.mark.parametrize("changes", [{"token_s": 0.0}, {"overhead_s": -1e-3}, {"kv_capacity_tokens": 0}, {"more": 1}])
def test_a_file_with_impossible_numbers_is_refused(tmp_path: Path, changes: dict[str, float]) -> None:
    file = tmp_path / "bad.json"
    HAND.save(file)
    fields = json.loads(file.read_text())[FILE_KEY]
    file.write_text(json.dumps({FILE_KEY: fields | changes}))
    with pytest.raises(ConfigError, match=f"bad.json: cost_model.{next(iter(changes))}"):
        CostModel.load(file)


def test_a_model_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        replace(HAND, name="x").save(tmp_path / "no folder" / "model.json")
