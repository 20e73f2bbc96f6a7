"""What the work during a pause gains: tool output that is computed before the tool ends, and calls that start early.

    python -m benchmarks.pause_work [--rounds 5] [--tokens 3500] [--seconds 5]

Part 1 runs the real CPU engine, with the built-in model and with a random model for which computing 3,500 tokens takes
about a second. A program pauses for a tool that writes 3,500 tokens over 5 s. Then its next turn comes, whose time to
first token is measured. Each round runs with the output sent while the tool writes, and without, and the next turn must
generate the same tokens. The same is done while other turns arrive, whose TTFT and TPOT are compared, and while the
replica is fully loaded, where the tokens that were computed early are compared with all others. A prompt that does not
extend the context (a client drops reasoning, or a template renders the history again) is computed in the pause, too:
the next prompt of so many tokens has only the first fifth of the context, and is known when the pause begins.

Part 2 runs a program of the cluster's own runner over a scripted stream of tokens. A turn of 1.5 s calls a read-only
tool of 1 s in its first third. The program's time is compared with that of the same tool without an early start.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Before vLLM is imported: one thread, the worker inside EngineCore, 1 GiB for the KV cache.
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.results import save
from cluster.config.schema import CaesuraConfig, PolicyConfig
from cluster.core.clock import MonotonicClock
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolOffer, ToolResult
from cluster.core.turn import CallDelta, Continuation, PromptMode, TurnBegan, TurnDelta, TurnDone, TurnPiece, pack_ids
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.runs.events import Limits, RunSpec, ToolAnswer
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.store import RunStore
from replicas.control import ControlChannel
from replicas.cost_model import CostModel
from replicas.host_tier import fit_tiers
from replicas.presets import DEFAULT, preset
from replicas.settings import SchedulerSettings
from replicas.tiny.model import tiny_model_directory

BLOCK, BLOCKS = 32, 500
CONTEXT = 500
PIECES = 50
SIZES = 128, 1000, 3500
"""Tokens of the prompts by which the cost model is fitted."""
MOST_OF_TTFT, MOST_OF_OTHERS, MOST_WASTED, LEAST_SAVED_S = 0.15, 1.02, 0.02, 0.5
"""The bounds that are to be reached."""

LARGER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 320, "intermediate_size": 1024,
    "num_hidden_layers": 10, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip


def start_engine(
    model: Path, cost: CostModel, policy: str = "caesura", tiers: Mapping[str, Any] | None = None
) -> AsyncLLM:
    """Start a replica's engine with a cost model, a policy and a `kv_transfer_config`."""
    settings = SchedulerSettings(policy=PolicyConfig(name=policy), cost=cost)
    arguments = AsyncEngineArgs(
        model=str(model),
        load_format="dummy" if not any(model.glob("*.safetensors")) else "auto",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=8192,
        enforce_eager=True,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS + 1,
        max_num_seqs=32,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        additional_config=settings.additional_config(),
        kv_transfer_config=tiers,
    )
    config = arguments.create_engine_config()
    fit_tiers(config)
    return AsyncLLM.from_vllm_config(config)


@dataclass
class Served:
    """The measured times of one turn."""

    tokens: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    tpot_s: float = 0.0


async def turn(engine: AsyncLLM, program: str, prompt: list[int], output: int, *, last: bool = False) -> Served:
    """Run a turn of ``output`` tokens."""
    identity = ProgramIdentity(program_id=program, last_turn=last, hints=Hints(expected_tool="tool", retention_s=300.0))
    params = SamplingParams(
        max_tokens=output,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={WIRE_KEY: identity.encode()},
    )
    served, start_s = Served(), time.perf_counter()
    async for one in engine.generate({"prompt_token_ids": prompt}, params, f"{program}-{start_s}"):
        served.ttft_s = served.ttft_s or time.perf_counter() - start_s
        served.tokens.extend(one.outputs[0].token_ids)
    took_s = time.perf_counter() - start_s
    served.tpot_s = (took_s - served.ttft_s) / max(1, output - 1)
    return served


async def others(engine: AsyncLLM, name: str, seconds: float, gap_s: float, seed: int) -> list[Served]:
    """Run turns of other programs, which arrive as a Poisson process, one in ``gap_s`` seconds.

    Regular arrivals would always, or never, meet a piece of the tool's output.
    """
    draws = random.Random(seed)
    tasks: list[asyncio.Task[Served]] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        prompt = [draws.randrange(100, 900) for _ in range(128)]
        tasks.append(asyncio.create_task(turn(engine, f"{name}-{len(tasks)}", prompt, 24, last=True)))
        await asyncio.sleep(draws.expovariate(1 / gap_s))
    return list(await asyncio.gather(*tasks))


@dataclass(frozen=True)
class Setting:
    """What happens beside the program that pauses."""

    tokens: int
    seconds: float
    gap_s: float | None = None
    """Mean seconds between turns of other programs. None: there are none."""


async def pause(engine: AsyncLLM, number: int, early: bool, setting: Setting) -> tuple[Served, list[Served]]:
    """Run one program: a turn, its tool, and its next turn. Return the next turn and the other programs' turns."""
    channel = ControlChannel(engine, 60.0)
    await channel.call("reset")
    name = f"p{number}{early}"
    prompt = [100 + (place * 7 + number) % 900 for place in range(CONTEXT)]
    context = prompt + (await turn(engine, name, prompt, 4)).tokens
    output = [100 + (place * 11 + number) % 900 for place in range(setting.tokens)]
    beside = None
    if setting.gap_s is not None:
        beside = asyncio.create_task(others(engine, f"o{number}{early}", setting.seconds, setting.gap_s, number))
    begin_s, at = time.perf_counter(), len(context)
    for piece in range(PIECES):
        end = setting.tokens * (piece + 1) // PIECES
        await asyncio.sleep(max(0.0, begin_s + setting.seconds * (piece + 1) / PIECES - time.perf_counter()))
        if early:
            ids = output[at - len(context) : end]
            answer = await channel.call("extend", key=f"default/{name}", at=at, ids=pack_ids(ids))
            at += len(ids) if answer["ended"] is None else 0
    served = await turn(engine, name, context + output, 4, last=True)
    return served, await beside if beside is not None else []


async def rewritten_pause(engine: AsyncLLM, number: int, ahead: bool, setting: Setting) -> Served:
    """Run one program whose next prompt differs from its context. Return the next turn."""
    channel = ControlChannel(engine, 60.0)
    await channel.call("reset")
    name = f"r{number}{ahead}"
    prompt = [100 + (place * 7 + number) % 900 for place in range(CONTEXT)]
    await turn(engine, name, prompt, 4)
    same = CONTEXT // 5
    rendered = prompt[:same] + [100 + (place * 11 + number) % 900 for place in range(setting.tokens - same)]
    if ahead:
        answer = await channel.call(
            "extend", key=f"default/{name}", at=same, ids=pack_ids(rendered[same:]), rewrites=True
        )
        assert answer["ended"] is None, answer
    await asyncio.sleep(setting.seconds)
    return await turn(engine, name, [*rendered, *prompt_of_answer(number)], 4, last=True)


def prompt_of_answer(number: int) -> list[int]:
    """Return a tool's answer of 32 tokens."""
    return [100 + (place * 13 + number) % 900 for place in range(32)]


async def part_rewritten(engine: AsyncLLM, rounds: int, setting: Setting) -> dict[str, float]:
    """Compare rounds in which the next prompt is computed in the pause and rounds in which it is not."""
    found: dict[bool, list[Served]] = {True: [], False: []}
    for number in range(-1, rounds):  # the first round warms up
        both = {}
        for ahead in (True, False) if number % 2 else (False, True):
            both[ahead] = await rewritten_pause(engine, number + 1, ahead, setting)
            if number >= 0:
                found[ahead].append(both[ahead])
        assert both[True].tokens == both[False].tokens, "the tokens differ"
    times = {
        state: statistics.median(one.ttft_s for one in found[ahead]) * 1e3
        for state, ahead in (("ahead", True), ("today", False))
    }
    return {**times, "ratio": times["ahead"] / times["today"]}


async def numbers(engine: AsyncLLM) -> dict[str, Any]:
    snapshot: dict[str, Any] = (await ControlChannel(engine, 60.0).call("exchange"))["snapshot"]
    return snapshot


async def measured_cost(model: Path) -> CostModel:
    """Measure a step, a prompt token, a pair of tokens of attention, and a token of context that a step reads."""
    engine = start_engine(model, preset(DEFAULT))
    most = engine.vllm_config.scheduler_config.max_num_batched_tokens
    times: dict[int, list[Served]] = {tokens: [] for tokens in SIZES}
    try:
        for attempt, tokens in itertools.product(range(-1, 3), SIZES):  # the first attempt warms up
            prompt = [100 + (place * 13 + attempt + tokens) % 900 for place in range(tokens)]
            served = await turn(engine, f"cost{attempt}-{tokens}", prompt, 40, last=True)
            if attempt >= 0:
                times[tokens].append(served)
    finally:
        engine.shutdown()
    short, middle, long = SIZES
    step_s = {tokens: min(one.tpot_s for one in served) for tokens, served in times.items()}
    context_s = max(0.0, (step_s[long] - step_s[short]) / (long - short))
    overhead_s = step_s[short] - short * context_s
    # Of a prompt token: its own time, and half of the prompt's pairs.
    per_token = {
        tokens: (min(one.ttft_s for one in times[tokens]) - -(-tokens // most) * overhead_s) / tokens - context_s
        for tokens in (middle, long)
    }
    pair_s = max(0.0, 2 * (per_token[long] - per_token[middle]) / (long - middle))
    token_s = per_token[long] - pair_s * long / 2
    fitted = replace(preset(DEFAULT), overhead_s=overhead_s, token_s=token_s, weights_s=0.0)
    return replace(fitted, sequence_s=0.0, context_s=context_s, pair_s=pair_s)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


async def part_1(name: str, model: Path, rounds: int, setting: Setting) -> dict[str, Any]:
    """Compare rounds with and without early prefill."""
    cost = await measured_cost(model)
    engine = start_engine(model, cost)
    row: dict[str, Any] = {"model": name, "prompt_token_ms": cost.token_s * 1e3, "step_ms": cost.overhead_s * 1e3}
    row["block_step_ms"] = cost.step_s(BLOCK, CONTEXT + setting.tokens // 2, 1) * 1e3
    try:
        for label, beside in (("alone", setting), ("beside", replace(setting, gap_s=1.0))):
            before = await numbers(engine)
            found: dict[bool, list[tuple[Served, list[Served]]]] = {True: [], False: []}
            for number in range(-1, rounds):  # the first round warms up
                both = {}
                for early in (True, False) if number % 2 else (False, True):
                    both[early] = await pause(engine, number + 1, early, beside)
                    if number >= 0:
                        found[early].append(both[early])
                assert both[True][0].tokens == both[False][0].tokens, "the tokens differ"
            after = await numbers(engine)
            row[f"{label}_early_tokens"] = {
                outcome: after["early_prefill_tokens"][outcome] - before["early_prefill_tokens"][outcome]
                for outcome in ("used", "wasted")
            }
            row[f"{label}_ttft_ms"] = {
                state: statistics.median(served.ttft_s for served, _ in found[early]) * 1e3
                for state, early in (("early", True), ("today", False))
            }
            if beside.gap_s is not None:
                for quantity in ("ttft_s", "tpot_s"):
                    on, off = (
                        [getattr(one, quantity) for _, turns in found[early] for one in turns]
                        for early in (True, False)
                    )
                    row[f"others_{quantity[:4]}"] = {
                        "median_ratio": statistics.median(on) / statistics.median(off),
                        "mean_ratio": mean(on) / mean(off),
                        "today_ms": mean(off) * 1e3,
                    }
        row["rewritten_ttft_ms"] = await part_rewritten(engine, rounds, setting)
        before = await numbers(engine)
        await pause(engine, 99, True, replace(setting, gap_s=min(0.02, cost.token_s * 128 / 2)))
        after = await numbers(engine)
        early_tokens = sum(after["early_prefill_tokens"].values()) - sum(before["early_prefill_tokens"].values())
        row["full_load_early_share"] = early_tokens / (after["scheduled_tokens"] - before["scheduled_tokens"])
        wasted = after["early_prefill_tokens"]["wasted"] - before["early_prefill_tokens"]["wasted"]
        row["full_load_wasted_share"] = wasted / (after["scheduled_tokens"] - before["scheduled_tokens"])
    finally:
        engine.shutdown()
    return row


# --- part 2 -----------------------------------------------------------------------------------------------------------

TURN_S, TOOL_S, TOKENS = 1.5, 1.0, 30


class ScriptedStream:
    """A replica whose first turn calls a tool in its first third, and whose second turn is short."""

    async def turn(
        self,
        key: str,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        continuation: Continuation | None,
        *,
        answers: Sequence[int] = (),
    ) -> AsyncIterator[TurnPiece]:
        """Yield one token after the other."""
        yield TurnBegan(PromptMode.CONTINUED, pack_ids([1]))
        calls = continuation is None
        for number in range(TOKENS if calls else 2):
            await asyncio.sleep(TURN_S / TOKENS)
            made = (CallDelta(0, "call", "look", "{}"),) if calls and number == TOKENS // 4 else ()
            yield TurnDelta(pack_ids([number]), "" if made else "word ", calls=made)
        yield TurnDone("tool_calls" if calls else "stop", 10, 0, TOKENS)

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Ignore the notification: nothing is measured by it."""

    async def extend(self, key: str, body: Mapping[str, Any], continuation: Continuation | None) -> str | None:
        """Compute nothing."""
        return "not_held"


class OneTool:
    """A tool that takes TOOL_S."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """Run it."""
        await asyncio.sleep(TOOL_S)
        return ToolResult(call.id, call.name, Outcome.OK, "seen", statistics_name=call.name)

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """It has none before its end."""
        return None

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """No call is asynchronous here, so that the runner never asks.

        Raises:
            AssertionError: it has asked.
        """
        raise AssertionError(f"{call_id} of {program} is not asynchronous")

    async def cancel(self, program: str, call_id: str) -> bool:
        """It is not cancelled."""
        return False


async def program_s(runner: ProgramRunner, run_id: str, starts_early: bool) -> float:
    """Return the seconds of one program."""
    tool = ToolId.of_operator("look")
    offer = ToolOffer("look", {"name": "look"}, here=True, read_only=True, starts_early=starts_early, tool=tool)
    limits = Limits(turns=4, tool_calls=4, output_tokens=1000, wall_s=30.0, turn_attempts=1)
    messages = ({"role": "user", "content": "go"},)
    identity = ProgramIdentity("p").encode()
    began_s = time.perf_counter()
    spec = RunSpec(run_id, "responses", "t", "p", identity, "tiny", time.time(), limits, messages, offers=(offer,))
    await runner.start(spec)
    events = [event async for one in runner.follow(run_id) for event in one]
    took_s = time.perf_counter() - began_s
    assert [event.text for event in events if isinstance(event, ToolAnswer)] == ["seen"], events[-3:]
    return took_s


async def part_2(rounds: int) -> dict[str, Any]:
    """Compare programs with and without an early start."""
    with EmbeddedRedis() as redis:
        store = RunStore(redis.url, owner="bench", timeout_s=2.0, lease_s=10.0, retention_s=60.0)
        runner = ProgramRunner(
            name="bench",
            store=store,
            replicas=ScriptedStream(),
            tools=OneTool(),
            config=CaesuraConfig(),
            clock=MonotonicClock(),
            observe=lambda result: None,
        )
        took: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            for early in (True, False):
                took[early].append(await program_s(runner, f"r{number}{early}", early))
        await runner.aclose()
    early_s, today_s = (statistics.median(took[early]) for early in (True, False))
    return {"early_start_s": early_s, "today_s": today_s, "saved_s": today_s - early_s}


async def measure(rounds: int, setting: Setting, names: Sequence[str], path: Path | None) -> int:
    """Run, print, save; exit status 1 where a bound is missed with the first model."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LARGER))
        models = {"random": Path(directory), "built-in": tiny_model_directory()}
        for name in names:
            model = models[name]
            rows.append(await part_1(name, model, rounds, setting))
            print(json.dumps(rows[-1], indent=1), flush=True)
    rows.append(await part_2(rounds))
    print(json.dumps(rows[-1], indent=1))
    save("pause_work", rows, path)
    first = rows[0]
    reached = {
        "ttft": first["alone_ttft_ms"]["early"] <= MOST_OF_TTFT * first["alone_ttft_ms"]["today"],
        "others' ttft": first["others_ttft"]["median_ratio"] <= MOST_OF_OTHERS,
        "others' tpot": first["others_tpot"]["mean_ratio"] <= MOST_OF_OTHERS,
        "wasted": first["full_load_wasted_share"] <= MOST_WASTED,
        "early start": rows[-1]["saved_s"] >= LEAST_SAVED_S,
    }
    for bound, kept in reached.items():
        print(f"{bound}: {'reached' if kept else 'MISSED'}")
    return 0 if all(reached.values()) else 1


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--models", nargs="+", choices=("random", "built-in"), default=["random", "built-in"])
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    setting = Setting(arguments.tokens, arguments.seconds)
    return asyncio.run(measure(arguments.rounds, setting, arguments.models, arguments.json))


if __name__ == "__main__":
    sys.exit(main())
