"""The contracts of hold, swap and resume on an engine: the tokens of an undisturbed run, and every block free again.

A program of three turns runs four times. Its context is held in the pauses, or swapped out with the device's copy
erased, or swapped out and loaded before the next turn, or discarded and computed again. Held, swapped and loaded
contexts are the same bytes in steps of the same shapes, so their tokens have to be the same in 16 bits, too. A
context that is computed again takes other steps, in which 16 bits round otherwise: equality is required in 32 bits.
"""

import asyncio
import statistics
from contextlib import suppress

from benchmarks.gpu_kit.engine import Answer, Engine, Memory, running
from benchmarks.gpu_kit.model import full_attention, token_bytes
from benchmarks.gpu_kit.task import Findings, Task
from cluster.core.program import Hints, ProgramIdentity

FLOAT32 = "contracts-float32"
GENERATED = 20
ADDED = 25
"""Tokens that a turn generates, and that its tool returns."""
WAYS = {"held": ("continuum", ""), "swapped": ("infercept", "erase"), "loaded": ("infercept", "load")}
"""By name, the policy and what happens in a pause."""
DISCARDED = "computed again"
COUNTERS = ("swapped", "fetched", "swap_refused", "fetch_lost", "fetch_failed")
ROUNDS = 5
"""Repetitions of which the median time to first token is taken."""
TIER_TOKENS = 40_000
"""Size of the host tier. A program may have a quarter of it, which is more than the longest context."""


def memory_of(task: Task, dtype: str) -> Memory:
    """Return the memory of the engine: room for two of the longest contexts on the device, and more on the host."""
    tier_bytes = TIER_TOKENS * token_bytes(full_attention(task)) * (2 if dtype == "float32" else 1)
    if task.on_gpu:
        return Memory(16, 1025, tier_bytes, 8192, 16, 8192)
    return Memory(32, 257, tier_bytes, 4096, 16, 2048)


def run(task: Task, findings: Findings) -> None:
    """Run the contracts, in the type that the part's name says."""
    asyncio.run(_run(task, findings))


async def _run(task: Task, findings: Findings) -> None:
    dtype = "float32" if task.part == FLOAT32 else "bfloat16"
    findings.number("type", dtype)
    lengths = [300, 1500] if task.quick or not task.on_gpu else [300, 3500, 7000]
    async with running(task, full_attention(task), memory_of(task, dtype), dtype=dtype, policy="vllm") as engine:
        for length in lengths:
            await _same_tokens(engine, length, findings, strict=dtype == "float32")
        await _context_matters(engine, findings)
        await _aborts(engine, findings)
        await _resume_times(engine, lengths[-1], findings, 2 if task.quick else ROUNDS)


async def _same_tokens(engine: Engine, length: int, findings: Findings, *, strict: bool) -> None:
    """Run the program in each way, and compare tokens, cached tokens, counters and blocks."""
    before = (await engine.numbers())["counters"]
    again = await _program(engine, f"again-{length}", length, "vllm", "discard")
    found = {
        name: await _program(engine, f"{name}-{length}", length, policy, pause)
        for name, (policy, pause) in WAYS.items()
    }
    after = await engine.idle()
    held = [answer.tokens for answer in found["held"]]
    for name, answers in found.items():
        tokens = [answer.tokens for answer in answers]
        if name != "held":
            findings.check(
                f"{length} tokens: {name} gives the tokens of held", tokens == held, _first_difference(tokens, held)
            )
        expected = [(answer.cached, _whole(engine, length, turn)) for turn, answer in enumerate(answers)]
        findings.check(
            f"{length} tokens: {name} computes nothing again",
            all(cached == whole for cached, whole in expected),
            ", ".join(f"{cached} of {whole} cached" for cached, whole in expected),
        )
    difference = _first_difference([answer.tokens for answer in again], held)
    if strict:
        findings.check(f"{length} tokens: {DISCARDED} gives the tokens of held", not difference, difference)
    else:
        findings.number(f"{length} tokens: {DISCARDED} against held", difference or "the same tokens")
    grown = {kind: after["counters"].get(kind, 0) - before.get(kind, 0) for kind in COUNTERS}
    findings.check(
        f"{length} tokens: every pause was a swap, and every load ended",
        list(grown.values()) == [4, 2, 0, 0, 0],
        ", ".join(f"{kind} {count}" for kind, count in grown.items()),
    )
    _check_blocks(after, f"{length} tokens", findings)


async def _program(engine: Engine, name: str, length: int, policy: str, pause: str) -> list[Answer]:
    """Run three turns of growing context; the first one ends on the last token of a block where that is possible.

    Args:
        engine: the engine.
        name: the program's id.
        length: tokens of the first prompt.
        policy: the policy.
        pause: what happens in each pause: nothing (empty), ``discard`` (all caches are emptied), ``erase`` (the
            device's is, once the program is swapped), ``load`` (as erase, and then the tool finishes).
    """
    await engine.reset()
    await engine.channel.call("set_policy", name=policy)
    context, answers = [7 + i * 31 % 1900 for i in range(length)], []
    for turn in range(3):
        identity = ProgramIdentity(program_id=name, last_turn=turn == 2, hints=Hints(expected_tool="ls"))
        answers.append(await engine.turn(f"{name}-{turn}", context, GENERATED, identity))
        context = context + answers[-1].tokens + [11 + turn] * ADDED
        if turn == 2:
            continue
        if pause in ("erase", "load"):
            await engine.until(name, "swapped")
            await engine.erase()
        if pause == "discard":
            await engine.reset()
        if pause == "load":
            await engine.channel.call("tool_finished", key=f"default/{name}")
            await engine.until(name, "held")
    return answers


def _whole(engine: Engine, length: int, turn: int) -> int:
    """Return how many tokens in whole blocks the turn before has left. Its last token has no KV."""
    tokens = engine.memory.block_tokens
    known = length + turn * GENERATED + (turn - 1) * ADDED - 1 if turn else 0
    return known // tokens * tokens


def _first_difference(tokens: list[list[int]], expected: list[list[int]]) -> str:
    for turn, (got, wanted) in enumerate(zip(tokens, expected, strict=True)):
        for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one != other:
                return f"turn {turn + 1} differs from token {place + 1} on"
    return ""


async def _context_matters(engine: Engine, findings: Findings) -> None:
    """Check that another first block gives other tokens, so that the comparisons above can fail."""
    await engine.reset()
    prompt = [7 + i * 31 % 1900 for i in range(300)]
    answers = []
    for number, begin in enumerate((prompt[:32], [900] * 32)):
        answers.append(await engine.turn(f"context-{number}", begin + prompt[32:], GENERATED))
    same = sum(a == b for a, b in zip(answers[0].tokens, answers[1].tokens, strict=True))
    findings.check("another first block gives other tokens", same < GENERATED, f"{same} of {GENERATED} are the same")


async def _aborts(engine: Engine, findings: Findings) -> None:
    """Cancel turns that run, that wait and that have just been sent, and look for blocks that stay."""
    await engine.reset()
    await engine.channel.call("set_policy", name="infercept")
    sequences = engine.memory.max_num_seqs
    turns = [
        asyncio.create_task(engine.turn(f"abort-{i}", [20 + i] * 400, 200, ProgramIdentity(program_id=f"abort-{i}")))
        for i in range(2 * sequences)  # half of them wait
    ]
    for delay_s, some in ((0.0, turns[::4]), (0.2, turns[1::4]), (0.2, turns[2::4]), (0.2, turns[3::4])):
        await asyncio.sleep(delay_s)
        for one in some:
            one.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*turns, return_exceptions=True)
    for i in range(2 * sequences):
        await engine.channel.call("end", key=f"default/abort-{i}")
    _check_blocks(await engine.idle(), f"{2 * sequences} cancelled turns", findings)


async def _resume_times(engine: Engine, length: int, findings: Findings, rounds: int) -> None:
    """Measure the time to first token of a turn after each kind of pause."""
    ways = {**WAYS, DISCARDED: ("vllm", "discard")}
    first_ms: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):  # the first one warms up
        for name, (policy, pause) in ways.items():
            answers = await _program(engine, f"time-{name.split()[0]}-{number}", length, policy, pause)
            if number >= 0:
                first_ms[name].append(1e3 * answers[1].first_s)
    rows = [{"context": name, "tokens": length, "TTFT ms": statistics.median(v)} for name, v in first_ms.items()]
    findings.number("resume", rows)


def _check_blocks(numbers: dict[str, int], when: str, findings: Findings) -> None:
    free, total, held = (numbers[name] for name in ("free_blocks", "total_blocks", "held_blocks"))
    findings.check(
        f"{when}: every block is free again", (free, held) == (total, 0), f"{free} of {total} free, {held} held"
    )
