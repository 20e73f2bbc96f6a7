"""Copies between the device and pinned memory as a swap of KV makes them, alone and beside steps."""

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_kernels import BLOCK
from benchmarks.gpu_model import Model, Shape, Step, Timer, Work, choose, columns, host_seconds, summary

DIRECTIONS = ((True,), (False,), (True, False))
"""Whether to the host."""


class Location(ctypes.Structure):
    """CUmemLocation of cuda.h."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h. The order of reads from the source is 1 (of the stream) or 3 (any)."""

    _fields_ = (("order", ctypes.c_int), ("source", Location), ("target", Location), ("flags", ctypes.c_uint))


class Copies:
    """Copies of KV between the device and pinned memory, whole or by pages as vLLM's offloading worker makes them.

    The device has one tensor for each layer, with a page of keys and values for each block of 16 tokens. The host has
    all layers of a block side by side. vLLM 0.29 gives all pages of a transfer to one call of cuMemcpyBatchAsync if
    they have 28 KiB or more.
    """

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.layers, self.blocks = shape.layers, blocks
        self.page = shape.kv_bytes_per_token * BLOCK // shape.layers
        self.device = torch.empty(shape.layers, blocks, self.page, device="cuda", dtype=torch.uint8).random_()
        self.host = torch.empty(blocks, shape.layers, self.page, dtype=torch.uint8, pin_memory=True)
        self.batch = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
        self.tables: dict[tuple[int, bool], tuple[Any, ...]] = {}

    def bytes(self, count: int) -> int:
        """Return the bytes of some blocks in all layers."""
        return count * self.layers * self.page

    def submit(self, how: str, count: int, to_host: bool, stream: Any) -> None:
        """Begin a copy of ``count`` blocks on a stream."""
        if how == "whole":
            size = self.bytes(count)
            device, host = self.device.view(-1)[:size], self.host.view(-1)[:size]
            with torch.cuda.stream(stream):
                (host if to_host else device).copy_(device if to_host else host, non_blocking=True)
            return
        targets, sources, sizes, number = self._table(count, to_host)
        attributes, first = Attributes(1 if to_host else 3), ctypes.c_size_t(0)
        found = self.batch(
            targets, sources, sizes, ctypes.c_size_t(number), ctypes.byref(attributes), ctypes.byref(first),
            ctypes.c_size_t(1), ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if found:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {found}")

    def check(self, stream: Any) -> None:
        """Copy some pages there and back, and raise RuntimeError if the bytes differ."""
        before = self.device.clone()
        self.submit("pages", self.blocks, True, stream)
        stream.synchronize()
        self.device.zero_()
        torch.cuda.synchronize()
        self.submit("pages", self.blocks, False, stream)
        stream.synchronize()
        if not torch.equal(before, self.device):
            raise RuntimeError("cuMemcpyBatchAsync: the pages that came back differ")

    def _table(self, count: int, to_host: bool) -> tuple[Any, ...]:
        if (count, to_host) not in self.tables:
            generator = torch.Generator().manual_seed(count)
            here, there = (torch.randperm(self.blocks, generator=generator)[:count].tolist() for _ in range(2))
            numbers = ctypes.c_uint64 * (count * self.layers)
            device = [
                self.device.data_ptr() + (n * self.blocks + b) * self.page for n in range(self.layers) for b in here
            ]
            host = [self.host.data_ptr() + (b * self.layers + n) * self.page for n in range(self.layers) for b in there]
            pair = (numbers(*host), numbers(*device)) if to_host else (numbers(*device), numbers(*host))
            self.tables[count, to_host] = (*pair, numbers(*[self.page] * len(host)), len(host))
        return self.tables[count, to_host]


def measure_copies(name: str, copies: Copies, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the times of single copies by size, direction and way, and the bandwidth of copies without a pause."""
    rows = []
    stream = torch.cuda.Stream()
    copies.check(stream)
    for how in ("whole", "pages"):
        for to_host in (True, False):
            for count in counts:
                seconds, submitted = [], []
                for _ in range(9):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda.synchronize()
                    start.record(stream)
                    submitted.append(host_seconds(lambda: copies.submit(how, count, to_host, stream)))  # noqa: B023
                    end.record(stream)
                    end.synchronize()
                    seconds.append(start.elapsed_time(end) / 1e3)
                size = copies.bytes(count)
                rate = round(size / statistics.median(seconds[2:]) / 1e9, 2)
                rows.append({
                    "by": "copy", "model": name, "how": how, "to": "host" if to_host else "device", "blocks": count,
                    "bytes": size, **summary(seconds[2:]), "gb_per_s": rate,
                    "submit_ms": round(1e3 * statistics.median(submitted[2:]), 4),
                })  # fmt: skip
                print(rows[-1], flush=True)
    for how in ("whole", "pages"):
        for directions in DIRECTIONS:
            copying = begin(copies, how, directions)
            time.sleep(0.3)
            stop(copying)
            rows.append({
                "by": "copies", "model": name, "how": how, "to": both(directions), "blocks": copies.blocks,
                "bytes": copies.bytes(copies.blocks), "gb_per_s": [thread.gb_per_s for thread in copying],
                "errors": [thread.error for thread in copying if thread.error],
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


class Copying(threading.Thread):
    """Copies without a pause, two transfers deep, until it is stopped."""

    def __init__(self, copies: Copies, how: str, count: int, to_host: bool) -> None:
        super().__init__(daemon=True)
        self.copies, self.how, self.count, self.to_host = copies, how, count, to_host
        self.stopping = threading.Event()
        self.done, self.elapsed_s, self.error = 0, 0.0, ""

    def run(self) -> None:
        """Copy until ``stopping`` is set. ``error`` says what went wrong."""
        torch.zeros(1, device="cuda")  # makes the context current in this thread
        stream = torch.cuda.Stream()
        ends: list[Any] = []
        start = time.perf_counter()
        try:
            while not self.stopping.is_set():
                self.copies.submit(self.how, self.count, self.to_host, stream)
                ends.append(torch.cuda.Event())
                ends[-1].record(stream)
                if len(ends) > 1:
                    ends[-2].synchronize()
            stream.synchronize()
        except RuntimeError as error:
            self.error = str(error)
        self.done, self.elapsed_s = len(ends), time.perf_counter() - start

    @property
    def gb_per_s(self) -> float:
        """Return the bandwidth from the first copy to the last one."""
        return round(self.done * self.copies.bytes(self.count) / max(self.elapsed_s, 1e-9) / 1e9, 2)


def begin(copies: Copies, how: str, directions: Sequence[bool]) -> list[Copying]:
    """Begin to copy all blocks, in one direction or in both."""
    copying = [Copying(copies, how, copies.blocks, to_host) for to_host in directions]
    for thread in copying:
        thread.start()
    return copying


def stop(copying: Sequence[Copying]) -> None:
    """Stop copies and wait for their end."""
    for thread in copying:
        thread.stopping.set()
    for thread in copying:
        thread.join()


def both(directions: Sequence[bool]) -> str:
    return " and ".join("host" if to_host else "device" for to_host in directions)


def measure_overlap(
    name: str, model: Model, works: Sequence[Work], right: dict[str, list[Any]], copies: Copies, timer: Timer
) -> Iterator[dict[str, Any]]:
    """Yield how steps slow down beside copies, and the bandwidth that these reach."""
    for work in works:
        step = Step(model, work)
        choose(step, right, timer)
        run = timer.prepared(step.run)
        alone = summary(timer.seconds(run))
        for how in ("whole", "pages"):
            for directions in DIRECTIONS:
                copying = begin(copies, how, directions)
                time.sleep(0.03)
                beside = summary(timer.seconds(run))
                stop(copying)
                row = {
                    "by": "overlap", "model": name, **columns(work), "how": how, "blocks": copies.blocks,
                    "to": both(directions), **beside,
                    "alone_ms": alone["ms"], "ratio": round(beside["ms"] / alone["ms"], 4),
                    "gb_per_s": [thread.gb_per_s for thread in copying],
                    "errors": [thread.error for thread in copying if thread.error],
                }  # fmt: skip
                print(row, flush=True)
                yield row
