"""The offload path under pressure for ten minutes, with the host tier full (vllm#54914).

vLLM 0.29 has been reported to end with an assertion in its offloading connector (`prepare_load`: a chunk that the
lookup had promised is not there) once the host tier is full and evicts. The reports have models with sliding-window
layers, so one of the parts has them. They also have groups of KV blocks of several sizes and speculative decoding,
which the models here have not. The load (`benchmarks.gpu_kit.load`) fills the tier within seconds and keeps it full.
The policy changes each round. After a round, contexts of paused programs are loaded from the host, and the most
probable next tokens are compared with those of the same context computed again.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from benchmarks.gpu_kit.engine import Engine, Memory, running
from benchmarks.gpu_kit.load import Load, Plan
from benchmarks.gpu_kit.model import full_attention, sliding_window, token_bytes
from benchmarks.gpu_kit.parts import PARTS
from benchmarks.gpu_kit.stock_tier import stock_config
from benchmarks.gpu_kit.task import Findings, Task
from cluster.core.clock import MonotonicClock
from cluster.core.errors import EngineGone
from cluster.core.program import ProgramIdentity

SLIDING = ("pressure-2", "pressure-vllm")
STOCK = "pressure-vllm"
STOCK_S = 300.0
"""Seconds that the part with vLLM's own tier takes."""
MARGIN_S = 75.0
"""Seconds of the limit that are left for imports, the end of the last turns, the last comparison and the end."""
ROUND_S, QUICK_ROUND_S, QUICK_S = 60.0, 8.0, 24.0
POLICIES = ("caesura", "infercept", "vllm")
COMPARED = 6
"""Contexts that are compared after a round."""
FULL = 0.95
"""Share of the tier from which on it counts as full."""
LEAST_FULL = 0.8
"""Share of the load's time in which the tier has to be full."""
TOP, LEAST_SHARED = 20, 10
"""Most probable next tokens that are compared, and how many have to be the same. Of unrelated contexts hardly one is.
"""
COUNTERS = ("swapped", "fetched", "swap_refused", "fetch_lost", "fetch_failed", "superseded_blocks")

GPU_PLAN = Plan(48, 512, (64, 1200), (8, 64), 7000, 10, 0.4)
CPU_PLAN = Plan(16, 64, (32, 300), (4, 12), 1500, 8, 0.2)


def run(task: Task, findings: Findings) -> None:
    """Load the engine until the time is over."""
    asyncio.run(_run(task, findings))


def memory_of(task: Task) -> Memory:
    """Return the memory of the engine: 32,000 tokens on the device and twice as many on the host; less on a CPU."""
    if not task.on_gpu:
        return Memory(32, 129, 8 << 20, 2048, 16, 512)
    return Memory(16, 2049, 65_536 * token_bytes(full_attention(task)), 8192, 32, 4096)


def memory_tokens(task: Task) -> float:
    """Return the size of the host tier, in tokens of the model with sliding windows."""
    return memory_of(task).tier_bytes / token_bytes(sliding_window(task))


@dataclass(slots=True)
class Watch:
    """The scheduler's numbers while the load runs."""

    engine: Engine
    seconds: float = 0.0
    full_s: float = 0.0
    least_free: int = 1 << 40
    most_waiting: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Sample the numbers during the context."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sample(self) -> None:
        before_s = self.engine.clock.now_s()
        while True:
            await asyncio.sleep(0.25)
            try:
                self.last = await self.engine.numbers()
            except EngineGone:
                return
            now_s = self.engine.clock.now_s()
            self.seconds += now_s - before_s
            if self.last["host_used_tokens"] >= FULL * max(1, self.last["host_tokens"]):
                self.full_s += now_s - before_s
            before_s = now_s
            self.least_free = min(self.least_free, self.last["free_blocks"])
            self.most_waiting = max(self.most_waiting, self.last["waiting"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """A context that was loaded from the host, against the same one computed again."""

    program: str
    tokens: int
    loaded: int
    """Tokens that were loaded."""
    shared: int
    """How many of the `TOP` most probable next tokens are the same."""
    difference: float
    """Mean difference of the log probabilities of these."""


async def _run(task: Task, findings: Findings) -> None:
    stock, memory = task.part == STOCK, memory_of(task)
    model = sliding_window(task) if task.part in SLIDING else full_attention(task)
    tier = stock_config(memory.tier_bytes) if stock else None
    clock = MonotonicClock()
    end_s = clock.now_s() + min(task.limit_s, STOCK_S if stock else task.limit_s) - MARGIN_S
    async with running(task, model, memory, dtype="bfloat16", policy="vllm", tier=tier) as engine:
        began_s = clock.now_s()
        end_s = began_s + QUICK_S if task.quick else end_s
        load, watch = Load(engine, GPU_PLAN if task.on_gpu else CPU_PLAN), Watch(engine)
        compared: list[Comparison] = []
        rounds = cycle(("vllm",) if stock else POLICIES)
        while (left_s := end_s - clock.now_s()) > 0 and not load.dead:
            policy = next(rounds)
            await engine.channel.call("set_policy", name=policy)
            async with watch.watching():
                await load.run(
                    f"{policy}-{round(clock.now_s())}", min(left_s, QUICK_ROUND_S if task.quick else ROUND_S)
                )
            if not load.dead:
                compared += await _compare(engine, load)
            _record(findings, load, compared, began_s)
            if watch.last and not stock:
                _record_tier(findings, watch)
        if stock:
            _judge_stock(task, findings, load, began_s)
        elif not watch.last:
            findings.check("the load begins", False, load.dead or f"the engine started too late for {task.limit_s:g} s")
        else:
            _judge(findings, load, watch, compared)
            if not load.dead:
                await _check_end(engine, findings)


async def _compare(engine: Engine, load: Load) -> list[Comparison]:
    """Load contexts of paused programs from the host, and compare them with contexts that are computed again."""
    await engine.idle()
    await engine.erase()
    found = []
    for name in list(load.paused)[::-1][:COMPARED]:
        prompt = [*load.paused[name], *range(40, 48)]
        loaded = await engine.turn(f"{name}-loaded", prompt, 1, ProgramIdentity(program_id=name), logprobs=TOP)
        again = await engine.turn(f"{name}-again", prompt, 1, logprobs=TOP, salt=f"{name}-again")
        if not loaded.cached or again.cached:
            continue
        shared = loaded.first_logprobs.keys() & again.first_logprobs.keys()
        apart = [abs(loaded.first_logprobs[token] - again.first_logprobs[token]) for token in shared]
        found.append(Comparison(name, len(prompt), loaded.cached, len(shared), sum(apart) / max(1, len(apart))))
    for name in load.paused:
        await engine.channel.call("end", key=f"default/{name}")
    return found


def _record(findings: Findings, load: Load, compared: list[Comparison], began_s: float) -> None:
    """Write the numbers so far, so that a part that is ended leaves them."""
    findings.number("seconds since the load began", round(load.engine.clock.now_s() - began_s))
    for name, count in sorted(load.counts.items()):
        findings.number(name, count)
    findings.number("contexts compared", len(compared))
    findings.number("tokens of them that were loaded", sum(one.loaded for one in compared))
    if compared:
        findings.number(f"least shared of the {TOP} most probable tokens", min(one.shared for one in compared))
        findings.number("largest mean difference of their log probabilities", max(one.difference for one in compared))


def _record_tier(findings: Findings, watch: Watch) -> None:
    """Write the scheduler's numbers of the host tier. It knows none of vLLM's own tier."""
    findings.number("seconds under load", round(watch.seconds))
    findings.number("seconds with the tier full", round(watch.full_s))
    for name in ("host_tokens", "host_used_tokens", "stored_tokens", "fetched_tokens", "total_blocks"):
        findings.number(name, watch.last[name])
    for name in COUNTERS:
        findings.number(name, watch.last["counters"].get(name, 0))
    findings.number("least free blocks", watch.least_free)
    findings.number("most waiting turns", watch.most_waiting)


def _judge(findings: Findings, load: Load, watch: Watch, compared: list[Comparison]) -> None:
    findings.check("the engine lives", not load.dead, load.dead)
    findings.check("no turn is stuck", not load.stuck, ", ".join(load.stuck[:5]))
    findings.check("no turn is cut short", not load.counts["turns cut short"])
    share = watch.full_s / max(1e-9, watch.seconds)
    findings.check(f"the tier is full for {LEAST_FULL:.0%} of the time", share >= LEAST_FULL, f"{share:.0%}")
    moved = (watch.last["stored_tokens"], watch.last["fetched_tokens"])
    findings.check(
        "more was stored than the tier holds, and contexts came back",
        moved[0] > watch.last["host_tokens"] and moved[1] > 0,
        f"{moved[0]:,} tokens stored, {moved[1]:,} loaded, {watch.last['host_tokens']:,} in the tier",
    )
    wrong = [one for one in compared if one.shared < LEAST_SHARED]
    findings.check(
        "loaded contexts are those that were stored",
        bool(compared) and not wrong,
        "; ".join(map(str, wrong[:3])) or f"{len(compared)} compared",
    )


def _judge_stock(task: Task, findings: Findings, load: Load, began_s: float) -> None:
    """Record whether vLLM's own tier lived. This part compares, so that its death is no failure of Caesura."""
    findings.check("the load ran", load.counts["turns completed"] > 0, f"{load.counts['turns completed']} turns")
    computed = load.counts["prompt tokens"] - load.counts["cached tokens"]
    findings.number("computed prompt tokens, in sizes of the tier", computed / memory_tokens(task))
    findings.number("vLLM's own tier", "the engine died" if load.dead else "the engine lived")
    if load.dead:
        log = next(part for part in PARTS if part.name == task.part).files(task.out).log
        lines = re.findall(
            r".*(?:AssertionError|offloading/scheduler\.py|cpu/manager\.py).*",
            log.read_text(encoding="utf-8", errors="replace"),
        )
        findings.number("seconds until it died", round(load.engine.clock.now_s() - began_s))
        findings.number("its traceback", [{"line": line[-200:]} for line in lines[-8:]])


async def _check_end(engine: Engine, findings: Findings) -> None:
    """Check that the idle engine has every block, and still answers."""
    await engine.idle()
    await engine.reset()
    after = await engine.numbers()
    free, total, held = (after[name] for name in ("free_blocks", "total_blocks", "held_blocks"))
    findings.check("every block is free again", (free, held) == (total, 0), f"{free} of {total} free, {held} held")
    answer = await engine.turn("last", [30] * 100, 8)
    findings.check("the engine answers", len(answer.tokens) == 8)
