"""The kernels of `benchmarks.gpu_steps`: small ones between the matrix products, and attention.

It needs torch and Triton, and no other module.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BLOCK = 16
"""Tokens of a block of the KV cache."""
ROPE_BASE = 5e5


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(x, residual, weight, out, size, ADD: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, WIDTH)
    inside = column < size
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + at + column, value, mask=inside)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / size + 1e-5)
    tl.store(out + at + column, value * scale * tl.load(weight + column, mask=inside, other=0.0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rope_store(  # type: ignore[no-untyped-def]
    qkv, positions, slots, q, k, v, log_base,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys of one token, and write keys and values into the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = head < HEADS + 2 * KV
    source = qkv + token * (HEADS + 2 * KV) * 2 * HALF + head * 2 * HALF + i
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + token).to(tl.float32) * tl.exp(i.to(tl.float32) * (-log_base / HALF))
    turned = head < HEADS + KV
    first = tl.where(turned, left * tl.cos(angle) - right * tl.sin(angle), left)
    second = tl.where(turned, right * tl.cos(angle) + left * tl.sin(angle), right)
    to_q = q + (token * HEADS + head) * 2 * HALF + i
    tl.store(to_q, first, mask=head < HEADS)
    tl.store(to_q + HALF, second, mask=head < HEADS)
    slot = tl.load(slots + token).to(tl.int64) * KV
    to_k = k + (slot + head - HEADS) * 2 * HALF + i
    is_k = (head >= HEADS) & turned
    tl.store(to_k, first, mask=is_k)
    tl.store(to_k + HALF, second, mask=is_k)
    to_v = v + (slot + head - HEADS - KV) * 2 * HALF + i
    is_v = inside & (head >= HEADS + KV)
    tl.store(to_v, first, mask=is_v)
    tl.store(to_v + HALF, second, mask=is_v)


@triton.jit  # type: ignore[untyped-decorator]
def activate(x, out, size, GATED: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    if GATED:
        gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
        value = gate / (1 + tl.exp(-gate)) * up
    else:
        value = tl.maximum(tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32), 0.0)
    tl.store(out + row * size + column, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def attend_part(  # type: ignore[no-untyped-def]
    q, k, v, table, part, part_lse, length, table_width, chunk, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend to a part of one sequence's paged KV, for the queries of one KV head."""
    sequence, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, d, n = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, WIDTH)
    first = (sequence * KV + head) * GROUP
    query = tl.load(q + (first + row)[:, None] * DIM + d[None, :], mask=(row < GROUP)[:, None], other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    end = tl.minimum((index + 1) * chunk, length)
    for at in range(index * chunk, end, WIDTH):
        token = at + n
        inside = token < end
        page = tl.load(table + sequence * table_width + token // PAGE, mask=inside, other=0).to(tl.int64)
        place = ((page * PAGE + token % PAGE) * KV + head)[:, None] * DIM + d[None, :]
        keys = tl.load(k + place, mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(query, tl.trans(keys)) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weight = tl.exp(scores - larger[:, None])
        shrink = tl.exp(largest - larger)
        values = tl.load(v + place, mask=inside[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
        largest = larger
    parts = tl.num_programs(2)
    to = (first + row) * parts + index
    tl.store(part + to[:, None] * DIM + d[None, :], sums / total[:, None], mask=(row < GROUP)[:, None])
    tl.store(part_lse + to, largest + tl.log(total), mask=row < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def join_parts(part, part_lse, out, parts, PARTS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    index, d = tl.arange(0, PARTS), tl.arange(0, DIM)
    lse = tl.load(part_lse + row * parts + index, mask=index < parts, other=-float("inf"))
    weight = tl.exp(lse - tl.max(lse, 0))
    place = part + (row * parts + index)[:, None] * DIM + d[None, :]
    values = tl.load(place, mask=(index < parts)[:, None], other=0.0)
    tl.store(out + row * DIM + d, tl.sum(values * (weight / tl.sum(weight, 0))[:, None], 0))


@dataclass(frozen=True)
class Paged:
    """Attention of decodes over paged KV by this file's kernel, in about ``per_core`` programs for each core."""

    width: int
    warps: int
    stages: int
    per_core: int

    def __call__(self, q: Any, keys: Any, values: Any, table: Any, length: int, out: Any) -> None:
        """Attend with one query of each sequence to its ``length`` tokens, and write to ``out``."""
        decodes, heads, dim = q.shape
        kv_heads = keys.shape[1]
        wanted = max(1, self.per_core * 132 // (decodes * kv_heads))
        chunk = self.width * -(-length // (self.width * min(wanted, 64)))
        parts = -(-length // chunk)
        part = torch.empty(decodes, heads, parts, dim, device=q.device, dtype=torch.float32)
        lse = torch.empty(decodes, heads, parts, device=q.device, dtype=torch.float32)
        group = heads // kv_heads
        attend_part[(decodes, kv_heads, parts)](
            q, keys, values, table, part, lse, length, table.shape[1], chunk, dim**-0.5,
            KV=kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, PAGE=BLOCK,
            WIDTH=self.width, num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip
        padded = triton.next_power_of_2(parts)
        join_parts[(decodes * heads,)](part, lse, out, parts, PARTS=padded, DIM=dim, num_warps=4)


def contiguous(q: Any, keys: Any, values: Any, table: Any, length: int, out: Any) -> None:
    """Attention of decodes by torch's flash kernel. It reads as many tokens, but from contiguous memory."""
    decodes, width = table.shape
    shape = (decodes, width * BLOCK, *keys.shape[1:])
    k, v = (cache[: decodes * width * BLOCK].view(shape)[:, :length].transpose(1, 2) for cache in (keys, values))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
    out.copy_(found[:, :, 0])


def flash(q: Any, keys: Any, values: Any) -> Any:
    """Attention of a prompt's last tokens by torch's flash kernel; on a CPU by plain torch."""
    new, seen = q.shape[0], keys.shape[0]
    if q.device.type == "cpu":
        return reference(q, keys, values)
    found = torch.ops.aten._flash_attention_forward(q, keys, values, *_ends(new, seen), new, seen, 0.0, True, False)
    return found[0]


_ENDS: dict[tuple[int, int], list[Any]] = {}


def _ends(new: int, seen: int) -> list[Any]:
    """Return the bounds of one sequence's queries and keys, on the device. A graph must not make them."""
    if (new, seen) not in _ENDS:
        _ENDS[new, seen] = [torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (new, seen)]
    return _ENDS[new, seen]


def cudnn(q: Any, keys: Any, values: Any) -> Any:
    """Attention of a prompt's last tokens by cuDNN: to themselves with a mask, and to those before without one."""
    new, before = q.shape[0], keys.shape[0] - q.shape[0]
    own, lse = _cudnn(q, keys[before:], values[before:], causal=True)
    if before:
        earlier, earlier_lse = _cudnn(q, keys[:before], values[:before], causal=False)
        share = torch.sigmoid(earlier_lse - lse).view(1, -1, new, 1).to(q.dtype)
        own = torch.lerp(own, earlier, share)
    return own[0].transpose(0, 1)


def _cudnn(q: Any, keys: Any, values: Any, causal: bool) -> tuple[Any, Any]:
    batched = [part.transpose(0, 1)[None] for part in (q, keys, values)]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*batched, None, True, 0.0, causal, False)
    return found[0], found[1]


def reference(q: Any, keys: Any, values: Any) -> Any:
    """Attention of the last tokens of one sequence, in float32."""
    new, seen = q.shape[0], keys.shape[0]
    group = q.shape[1] // keys.shape[1]
    k, v = (part.float().repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
    mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
    found = functional.scaled_dot_product_attention(q.float().transpose(0, 1), k, v, attn_mask=mask)
    return found.transpose(0, 1).to(q.dtype)


PAGED = [
    Paged(w, warps, stages, n) for w, warps, stages in ((64, 4, 3), (128, 4, 3), (128, 8, 2)) for n in (2, 4, 8, 16)
]


def name_of(kernel: Any) -> str:
    if isinstance(kernel, Paged):
        return f"paged {kernel.width}/{kernel.warps}/{kernel.stages}/{kernel.per_core}"
    return str(kernel.__name__)
