"""The measurement of GPU steps: its kernels and its step against plain torch, a tiny run, and what is compared."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_results, silicon
from replicas.presets import preset
from replicas.silicon.fit import fit_device
from replicas.silicon.measurements import load

ROOT = Path(__file__).parents[2]

PLAIN_STEP = """
import json, math, torch
from torch.nn import functional
from benchmarks.gpu_kernels import BLOCK, ROPE_BASE
from benchmarks.gpu_model import SHAPES, Model, Shape, Step, Work

def turned(x, position):
    half = x.shape[-1] // 2
    angle = position * torch.exp(torch.arange(half) * (-math.log(ROPE_BASE) / half))
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

def normed(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

def plain(model, step, caches):
    shape, work, x = model.shape, step.work, model.embedding[step.ids]
    for layer, (w_qkv, w_out, w_up, w_down) in enumerate(model.layers):
        keys, values = caches[layer]
        rows = []
        for i, row in enumerate(normed(x, model.norms[2 * layer]) @ w_qkv.T):
            heads = row.view(-1, shape.head_dim)
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
            rows.append(turned(q, int(step.positions[i])))
            keys[step.slots[i]], values[step.slots[i]] = turned(k, int(step.positions[i])), v
        found = []
        for i, q in enumerate(rows):
            if i < work.decodes:
                at = (step.table[i].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: work.length]
            else:
                at = torch.arange(work.context + i - work.decodes + 1)
            k, v = (part[at].repeat_interleave(shape.heads // shape.kv_heads, 1) for part in (keys, values))
            weight = torch.softmax(torch.einsum("hd,nhd->hn", q, k) / math.sqrt(shape.head_dim), -1)
            found.append(torch.einsum("hn,nhd->hd", weight, v).flatten())
        x = x + torch.stack(found) @ w_out.T
        up = normed(x, model.norms[2 * layer + 1]) @ w_up.T
        gate, rest = up[:, : shape.inner], up[:, shape.inner :]
        x = x + (functional.silu(gate) * rest if shape.gated else functional.relu(up)) @ w_down.T
    return (normed(x, model.norms[-1])[step.ends] @ model.head.T).argmax(-1)

torch.manual_seed(0)
answers = []
for shape in (SHAPES["tiny"], Shape(2, 64, 4, 4, 16, 96, 128, gated=False)):
    model = Model(shape, "cpu", 64, torch.float32)
    for work in (Work(decodes=3, length=70), Work(new=9, context=20), Work(5, 16, 2, 33)):
        step = Step(model, work)
        caches = [(k.clone(), v.clone()) for k, v in zip(model.keys, model.values)]
        expected = plain(model, step, caches)
        found = step.run()
        written = all(
            torch.allclose(a, b, atol=1e-3)
            for kept, cache in zip(zip(model.keys, model.values), caches) for a, b in zip(kept, cache)
        )
        answers.append([found.tolist(), expected.tolist(), written])
print(json.dumps(answers))
"""


def interpreted(*arguments: str) -> str:
    """Run Python with Triton's interpreter, which has to be chosen before Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_a_step_computes_what_plain_torch_computes() -> None:
    answers = json.loads(interpreted("-c", PLAIN_STEP).splitlines()[-1])
    assert [len(found) for found, _, _ in answers] == [3, 1, 3] * 2
    for found, expected, written in answers:
        assert found == expected
        assert written


def test_a_tiny_run_on_a_cpu_writes_rows_that_the_comparison_reads(tmp_path: Path) -> None:
    interpreted("-m", "benchmarks.gpu_steps", "--tiny", "--device", "cpu", "--json", str(tmp_path / "gpu_steps_x.json"))
    (record,) = gpu_results.records(tmp_path)
    assert record["errors"] == {}
    assert [row["kind"] for row in record["rows"]] == ["decode", "decode", "prefill", "prefill", "mixed"]
    found = gpu_results.measurements(tmp_path)
    assert len(found) == 5 + 3  # prompts also at rest
    assert all(0 < one.seconds < math.inf for one in found)
    assert found[-1].work == (8 + 3, 16 + 8 + 3 * 40, 4, 8 * 16 + 8 * 9 / 2 + 3 * 40)


def step(kind: str, tokens: int, batch: int, context: int, ms: float, **more: Any) -> dict[str, Any]:
    named = {"by": "step", "model": "llama-3.1-8b", "kind": kind, "tokens": tokens, "batch": batch, "context": context}
    return named | {"note": "", "ms": ms} | more


def copy(how: str, blocks: int, ms: float) -> dict[str, Any]:
    return {
        "by": "copy",
        "model": "llama-3.1-8b",
        "how": how,
        "to": "host",
        "blocks": blocks,
        "ms": ms,
        "gb_per_s": 1.0,
        "submit_ms": ms / 4,
    }


def test_predicted_over_measured(tmp_path: Path) -> None:
    cost = preset("llama-3.1-8b/h100")
    decode_ms = 1e3 * cost.decode_step_s(8, 8 * 1000)
    prompt_ms = 1e3 * cost.prefill_s(512, 4096)
    mixed_ms = 1e3 * cost.step_s(520, 512 + 4096 + 8000, 9, 512 * 4096 + 512 * 513 / 2 + 8000)
    copy_ms = 1e3 * cost.swap_s(64 * 16)
    rows = [
        step("decode", 8, 8, 1000, decode_ms),
        step("prefill", 512, 1, 4096, 2 * prompt_ms, rested_ms=prompt_ms),
        step("mixed", 520, 9, 4096, 2 * mixed_ms, rested_ms=mixed_ms / 1.5, note="8x1000"),
        copy("pages", 64, 2 * copy_ms),
        copy("pages", 4, copy_ms),
        copy("whole", 64, 1.5 * copy_ms),
    ]
    record = {"gpu": "h100", "torch": "2.11.0+cu130", "rows": rows}
    (tmp_path / "gpu_steps_h100.json").write_text(json.dumps(record))
    errors = fit_device("h100", [*load(), *gpu_results.measurements(tmp_path)]).errors()
    own = {(group.engine, group.phase): found.ratio for group, found in errors.items() if group.source == "gpu_steps"}
    assert own == pytest.approx(
        {
            ("torch 2.11.0, sustained", "decode"): 1,
            ("torch 2.11.0, sustained", "prefill"): 0.5,
            ("torch 2.11.0, rested", "prefill"): 1,
            ("torch 2.11.0, sustained", "mixed"): 0.5,
            ("torch 2.11.0, rested", "mixed"): 1.5,
        },
        abs=0.002,
    )
    copied, whole = gpu_results.copies(tmp_path)
    assert copied["explained"] == 1.0
    assert "explained" not in whole
    assert (copied["how"], copied["rows"], copied["ratio"]) == ("pages", 1, 0.5)
    (added,) = gpu_results.additions(tmp_path)
    assert (added["ratio"], added["prompt_ratio"]) == pytest.approx((1.5, 1), abs=0.002)
    assert added["sum_ms"] == pytest.approx(prompt_ms + decode_ms, abs=0.01)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_own_measurement_changes_no_fit(device: str) -> None:
    own = gpu_results.measurements()
    assert {one.gpu for one in own} == {"h100", "h200"}
    fit = fit_device(device, [*load(), *own])
    assert fit.reached == fit_device(device, load()).reached
    assert not any(one.source == gpu_results.SOURCE for one in fit.fitted)
    assert any(one.source == gpu_results.SOURCE for one in fit.held_out)


def test_kept_results_are_of_attention_kernels_that_were_right() -> None:
    for record in gpu_results.records():
        assert record["errors"] == {}
        assert all(row["attention"] for row in record["rows"] if row["by"] == "step")
        assert not any(row.get("errors") for row in record["rows"])


def test_the_page_has_rows_of_the_own_source() -> None:
    groups = silicon.steps([fit_device("h100", [*load(), *gpu_results.measurements()])])
    own = [row for row in groups if row.get("source") == gpu_results.SOURCE]
    assert {row["phase"] for row in own} == {"decode", "prefill", "mixed"}
    assert not any(row["targeted"] for row in own)
