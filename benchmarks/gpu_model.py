"""The models, steps and timer of `benchmarks.gpu_steps`, and the choice of attention kernels for a shape."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.nn import functional

from benchmarks.gpu_kernels import (
    BLOCK,
    PAGED,
    ROPE_BASE,
    Paged,
    activate,
    add_norm,
    contiguous,
    cudnn,
    flash,
    name_of,
    reference,
    rope_store,
)

HEADROOM_BYTES = 7e9
"""Device memory that activations, graphs and copies may take."""
LONGEST_S = 0.4
"""Seconds of repetitions of one shape, about."""
MOST_ERROR = 0.02
"""Relative error of an attention kernel from which on it is not used."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Without ``gated`` the feed-forward layer has two matrices, as in OPT."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    gated: bool = True

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of a key and a value in all layers and KV heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


SHAPES = {
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "vicuna-13b": Shape(40, 5120, 40, 40, 128, 13824, 32000),
    "opt-13b": Shape(40, 5120, 40, 40, 128, 20480, 50272, gated=False),
    "tiny": Shape(2, 64, 4, 2, 16, 96, 128),
}


@dataclass(frozen=True)
class Work:
    """One step: ``new`` tokens of a prompt after ``context`` others, and ``decodes`` sequences of ``length`` tokens."""

    new: int = 0
    context: int = 0
    decodes: int = 0
    length: int = 0

    @property
    def kind(self) -> str:
        """Return the phase, by the names of replicas/silicon/measurements.csv.gz."""
        return "mixed" if self.new and self.decodes else "prefill" if self.new else "decode"

    @property
    def tokens(self) -> int:
        """Return the number of scheduled tokens."""
        return self.new + self.decodes

    @property
    def blocks(self) -> int:
        """Return the number of blocks of KV."""
        return -(-(self.new + self.context) // BLOCK) + self.decodes * -(-self.length // BLOCK)


class Timer:
    """Runs and times work: on CUDA as a graph and by events, else by the host's clock."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def prepared(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return ``run`` as a graph, after two runs that compile and allocate."""
        for _ in range(2):
            run()
        if not self.cuda:
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay: Callable[[], object] = graph.replay
        return replay

    def seconds(self, run: Callable[[], object], longest_s: float = LONGEST_S, least: int = 5) -> list[float]:
        """Return the seconds of repeated runs, after runs that warm up."""
        for _ in range(2):
            run()
        first = self._timed(run, 1)[0]
        return self._timed(run, max(least, min(40, int(longest_s / max(first, 1e-6)))))

    def rested(self, run: Callable[[], object], count: int = 5, pause_s: float = 0.2) -> list[float]:
        """Return the seconds of runs that each follow a pause of little work, in which the device's power is low.

        A device at its limit of power lowers its clock. It does so after some milliseconds, so that a short step after
        a pause runs at the full clock.
        """
        seconds = []
        for _ in range(count):
            if self.cuda:
                light, end_s = torch.zeros(1 << 20, device="cuda"), time.perf_counter() + pause_s
                while time.perf_counter() < end_s:  # keeps the device from the clock of an idle one
                    light.add_(1)
                    time.sleep(5e-4)
                torch.cuda.synchronize()
            seconds += self._timed(run, 1)
        return seconds

    def _timed(self, run: Callable[[], object], count: int) -> list[float]:
        if not self.cuda:
            return [host_seconds(run) for _ in range(count)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, 10th and 90th percentile in ms, and the number of repetitions."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    numbers = {
        "ms": statistics.median(ordered),
        "p10_ms": ordered[round(last * 0.1)],
        "p90_ms": ordered[round(last * 0.9)],
    }
    return {name: round(1e3 * value, 5) for name, value in numbers.items()} | {"runs": len(ordered)}


class Model:
    """Random weights of one model, all layers distinct, and a KV cache that fills the memory."""

    def __init__(self, shape: Shape, device: str, blocks: int | None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        inner = shape.inner * (2 if shape.gated else 1)
        rows, columns = shape.heads * shape.head_dim, shape.hidden
        sizes = ((width, columns), (columns, rows), (inner, columns), (columns, shape.inner))
        self.layers = [[self._random(*size, scale=size[1] ** -0.5) for size in sizes] for _ in range(shape.layers)]
        self.norms = [self._random(columns) for _ in range(2 * shape.layers + 1)]
        self.embedding = self._random(shape.vocabulary, columns)
        self.head = self._random(shape.vocabulary, columns, scale=columns**-0.5)
        if blocks is None:
            free = torch.cuda.mem_get_info()[0] - HEADROOM_BYTES
            blocks = int(free // (shape.kv_bytes_per_token * BLOCK))
        self.blocks = blocks
        cache = (blocks * BLOCK, shape.kv_heads, shape.head_dim)
        self.keys = [self._random(*cache) for _ in range(shape.layers)]
        self.values = [self._random(*cache) for _ in range(shape.layers)]

    def _random(self, *size: int, scale: float = 1.0) -> Any:
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(0, scale)


class Step:
    """The inputs of one step of a model, and its run. Decodes are in random blocks, a prompt in the first ones."""

    def __init__(self, model: Model, work: Work) -> None:
        self.model, self.work = model, work
        device = model.device
        prompt_blocks = -(-(work.new + work.context) // BLOCK)
        width = max(1, -(-work.length // BLOCK))
        shuffled = torch.randperm(model.blocks - prompt_blocks, device=device)[: work.decodes * width]
        self.table = (shuffled + prompt_blocks).to(torch.int32).view(work.decodes, width)
        last = work.length - 1
        decode_slots = self.table[:, last // BLOCK].long() * BLOCK + last % BLOCK
        prompt = torch.arange(work.context, work.context + work.new, device=device)
        self.slots = torch.cat([decode_slots, prompt])
        self.positions = torch.cat([torch.full_like(decode_slots, last), prompt])
        self.ids = torch.randint(model.shape.vocabulary, (work.tokens,), device=device)
        ends = list(range(work.decodes)) + ([work.tokens - 1] if work.new else [])
        self.ends = torch.tensor(ends, device=device)
        self.decode: Callable[..., None] = Paged(64, 4, 3, 8)
        self.prefill: Callable[..., Any] = flash

    def run(self) -> Any:
        """Compute the step once, and return the next token of each sequence."""
        model, shape, work = self.model, self.model.shape, self.work
        x = functional.embedding(self.ids, model.embedding)
        residual = torch.empty_like(x)
        for index, (w_qkv, w_out, w_up, w_down) in enumerate(model.layers):
            normed = self._normed(x, residual, model.norms[2 * index], index > 0)
            q = self._rotated(functional.linear(normed, w_qkv), index)
            mixed = torch.empty_like(q)
            self.attend(q, mixed, index)
            x = functional.linear(mixed.view(work.tokens, -1), w_out)
            normed = self._normed(x, residual, model.norms[2 * index + 1], True)
            up = functional.linear(normed, w_up)
            active = torch.empty(work.tokens, shape.inner, device=x.device, dtype=x.dtype)
            grid = (work.tokens, triton.cdiv(shape.inner, 1024))
            activate[grid](up, active, shape.inner, GATED=shape.gated, WIDTH=1024)
            x = functional.linear(active, w_down)
        normed = self._normed(x, residual, model.norms[-1], True)
        return functional.linear(normed[self.ends], model.head).argmax(-1)

    def attend(self, q: Any, out: Any, index: int) -> None:
        """Attend to the KV of one layer, decodes first."""
        keys, values, decodes = self.model.keys[index], self.model.values[index], self.work.decodes
        if decodes:
            self.decode(q[:decodes], keys, values, self.table, self.work.length, out[:decodes])
        if self.work.new:
            seen = self.work.context + self.work.new
            out[decodes:].copy_(self.prefill(q[decodes:], keys[:seen], values[:seen]))

    def _normed(self, x: Any, residual: Any, weight: Any, add: bool) -> Any:
        out = torch.empty_like(x)
        size = x.shape[1]
        add_norm[(x.shape[0],)](
            x, residual, weight, out, size, ADD=add, WIDTH=triton.next_power_of_2(size), num_warps=8
        )
        return out

    def _rotated(self, qkv: Any, index: int) -> Any:
        shape = self.model.shape
        q = torch.empty(qkv.shape[0], shape.heads, shape.head_dim, device=qkv.device, dtype=qkv.dtype)
        rows = triton.next_power_of_2(shape.heads + 2 * shape.kv_heads)
        keys, values = self.model.keys[index], self.model.values[index]
        rope_store[(qkv.shape[0],)](
            qkv, self.positions, self.slots, q, keys, values, math.log(ROPE_BASE),
            HEADS=shape.heads, KV=shape.kv_heads, HALF=shape.head_dim // 2, ROWS=rows, num_warps=8,
        )  # fmt: skip
        return q


def checked(device: str, dtype: torch.dtype, timer: Timer, errors: dict[str, str]) -> dict[str, list[Any]]:
    """Return the attention kernels that run here and are right. ``errors`` gets what is wrong with the others."""
    right: dict[str, list[Any]] = {"decode": [], "prefill": []}
    heads, kv_heads, dim = (32, 8, 128) if device == "cuda" else (4, 2, 16)
    blocks, length = 64, 300
    keys, values = (torch.randn(blocks * BLOCK, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(4, heads, dim, device=device, dtype=dtype)
    table = torch.randperm(blocks, device=device)[: 3 * 19].to(torch.int32).view(3, 19)
    kernels = [*PAGED, contiguous] if device == "cuda" else PAGED[:1]
    for kernel in kernels:
        used = torch.arange(3 * 19, device=device, dtype=torch.int32).view(3, 19) if kernel is contiguous else table
        rows = (used.long()[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).view(3, -1)[:, :length]
        expected = torch.cat([reference(q[i : i + 1], keys[rows[i]], values[rows[i]]) for i in range(3)])

        def decoded(kernel: Any = kernel, used: Any = used) -> Any:
            out = torch.full_like(q[:3], float("nan"))
            kernel(q[:3], keys, values, used, length, out)
            return out

        if _is_right(name_of(kernel), decoded, expected, timer, errors):
            right["decode"].append(kernel)
    q = torch.randn(200, heads, dim, device=device, dtype=dtype)
    for prompt in (flash, cudnn) if device == "cuda" else (flash,):
        cases = [(f"{name_of(prompt)} {seen}", seen) for seen in (200, 500)]
        if all(
            _is_right(
                name,
                lambda seen=seen, prompt=prompt: prompt(q, keys[:seen], values[:seen]),  # type: ignore[misc]
                reference(q, keys[:seen], values[:seen]),
                timer,
                errors,
            )
            for name, seen in cases
        ):
            right["prefill"].append(prompt)
    return right


def _is_right(name: str, run: Callable[[], Any], expected: Any, timer: Timer, errors: dict[str, str]) -> bool:
    """Return whether a kernel gives what is expected, and can be a part of a graph."""
    try:
        found = run()
        timer.prepared(run)()
    except Exception as error:  # noqa: BLE001  # a kernel that does not run here is not measured; the result says why
        errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
        return False
    distance = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not distance < MOST_ERROR:
        errors[name] = f"relative error {distance:.3g}"
        return False
    return True


def choose(step: Step, right: dict[str, list[Any]], timer: Timer) -> dict[str, Any]:
    """Give the step the fastest attention kernels for its shape; return their names and times."""
    model, work, shape = step.model, step.work, step.model.shape
    q = torch.randn(work.tokens, shape.heads, shape.head_dim, device=model.device).to(model.dtype)
    out = torch.empty_like(q)
    seen, decodes = work.context + work.new, work.decodes
    layers = list(zip(model.keys, model.values, strict=True))

    def decode(kernel: Any) -> None:
        for keys, values in layers:
            kernel(q[:decodes], keys, values, step.table, work.length, out[:decodes])

    def prefill(kernel: Any) -> None:
        for keys, values in layers:
            kernel(q[decodes:], keys[:seen], values[:seen])

    chosen: dict[str, Any] = {}
    for part, run in (("decode", decode), ("prefill", prefill)):
        if not (decodes if part == "decode" else work.new):
            continue
        found = []
        for kernel in right[part]:
            prepared = timer.prepared(lambda run=run, kernel=kernel: run(kernel))  # type: ignore[misc]
            found.append((statistics.median(timer.seconds(prepared, longest_s=0.02, least=3)), kernel))
        seconds, best = min(found, key=lambda pair: pair[0])
        setattr(step, part, best)
        chosen[part] = {"kernel": name_of(best), "ms": round(1e3 * seconds, 4)}
    return chosen


def columns(work: Work) -> dict[str, Any]:
    """Return a step in the columns of replicas/silicon/measurements.csv.gz."""
    note = f"{work.decodes}x{work.length}" if work.kind == "mixed" else ""
    context = work.context if work.new else work.length
    batch = work.decodes + (1 if work.new else 0)
    return {"kind": work.kind, "tokens": work.tokens, "batch": batch, "context": context, "note": note}


def clocks() -> dict[str, Any]:
    """Return the clock in MHz and the power in W of the GPU just after a measurement, where they can be read."""
    try:
        return {"mhz": torch.cuda.clock_rate(), "watts": round(torch.cuda.power_draw() / 1e3)}
    except Exception:  # noqa: BLE001  # the library that reads them is optional, and its errors are its own
        return {}
