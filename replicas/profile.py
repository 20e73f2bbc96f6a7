"""Measures the cost model of a running vLLM engine, through the API that serves requests.

A *decode* sample is the time between the tokens of sequences that all decode. It is one iteration of the engine:
scheduling, forward pass, sampling, and the output's way to the caller as far as this does not overlap. A *prefill*
sample is the time from submitting a prompt to its first token. It is one iteration and the request's way into the
engine and out of it. The fit separates this way (`CostModel.turn_s`) from the step. The swap cost is measured with one
contiguous copy between device and host memory. It is the rate of the link; a scattered transfer may be slower.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.torch_utils import get_dtype_size, kv_cache_dtype_str_to_dtype
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel
from replicas.settings import in_one_process

SATURATIONS = 33
"""Number of saturation points that are tried, from the smallest to the second largest of the measured token counts."""

TOKEN_COLUMN = 2
"""Index in the result of `_columns` of the coefficient that a cost model always needs."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepSample:
    """The measured time of one kind of iteration."""

    tokens: int
    """Tokens that the step computes, of all its sequences together."""
    context: int
    """Sum of the sequences' lengths after the step, in tokens."""
    sequences: int
    pairs: float
    """Number of pairs of a new token and a token that it attends to."""
    seconds: float
    requests: int = 0
    """Number of requests whose way into the engine and out of it is part of ``seconds``."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The coefficients of the step time, as in `CostModel`, in seconds, and the relative errors of the fit."""

    overhead_s: float
    sequence_s: float
    weights_s: float
    token_s: float
    context_s: float
    pair_s: float
    request_s: float
    """Seconds of a request's way into the engine and out of it, which is not part of a step: `CostModel.turn_s`."""
    mean_error: float
    max_error: float

    def cost_model(self, name: str, **others: Any) -> CostModel:
        """Return the cost model. ``others`` are its fields that no step shows: the KV, the host link, the limits."""
        steps: dict[str, Any] = asdict(self)
        for beside in ("request_s", "mean_error", "max_error"):
            del steps[beside]
        return CostModel(name=name, turn_s=self.request_s, **steps, **others)


def fit_steps(samples: Sequence[StepSample]) -> StepCosts:
    """Return the coefficients with the least sum of squared relative errors.

    The form is linear once it is known where the roofs of the linear layers cross, which is searched over a grid.

    Raises:
        ConfigError: a time is not positive, or all samples have the same number of tokens.
    """
    seconds = np.array([sample.seconds for sample in samples])
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ConfigError("a cost model needs samples with positive times")
    counts = sorted({sample.tokens for sample in samples})
    if len(counts) < 2:
        raise ConfigError("a cost model needs samples of different numbers of tokens")
    _, saturation, solution = min(
        (
            (residual, saturation, solution)
            # At the largest count nothing would have been seen to grow.
            for saturation in np.geomspace(counts[0], counts[-2], SATURATIONS).tolist()
            for residual, solution in _solutions(_columns(samples, saturation) / seconds[:, None])
        ),
        key=itemgetter(0),
    )
    errors = np.abs(_columns(samples, saturation) @ solution / seconds - 1)
    overhead, sequence, token, context, pair, request = (float(value) for value in solution)
    return StepCosts(
        overhead_s=overhead,
        sequence_s=sequence,
        weights_s=saturation * token,
        token_s=token,
        context_s=context,
        pair_s=pair,
        request_s=request,
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
    )


def _columns(samples: Sequence[StepSample], saturation: float) -> Matrix:
    """Return the factors of the coefficients, shape [samples, coefficients]."""
    return np.array(
        [(1, s.sequences, max(s.tokens, saturation), s.context, s.pairs, s.requests) for s in samples],
        dtype=np.float64,
    )


def _solutions(weighted: Matrix) -> Iterator[tuple[float, Matrix]]:
    """Yield the least-squares solutions of ``weighted @ x = 1`` over the subsets of columns with all of x positive.

    The best of them is the exact optimum without negative coefficients, because the columns of its positive
    coefficients are one of the subsets.
    """
    target = np.ones(len(weighted))
    others = [column for column in range(weighted.shape[1]) if column != TOKEN_COLUMN]
    for size in range(len(others), -1, -1):
        for subset in combinations(others, size):
            chosen = [TOKEN_COLUMN, *subset]
            part, *_ = np.linalg.lstsq(weighted[:, chosen], target, rcond=None)
            if np.all(part > 0):
                solution = np.zeros(weighted.shape[1])
                solution[chosen] = part
                yield float(np.sum((weighted @ solution - target) ** 2)), solution
                if size == len(others):
                    return  # unconstrained and yet positive: nothing fits better


SWAP_BYTES = (1 << 20, 64 << 20)
"""Sizes in bytes of the two copies that measure the host link: one for its latency, one for its rate."""
SWAP_REPEATS = 5
FIRST_TOKEN_ID = 16
"""Smallest id in the random prompts. Most vocabularies have their special tokens below it."""


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is measured. Sizes beyond the engine's bounds are left out. Lengths are in tokens."""

    prompts: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """Numbers of new tokens of a prefill."""
    cached: tuple[int, ...] = (0, 512, 2048, 8192)
    """Numbers of tokens before them that the prefix cache has."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Numbers of sequences of a decode."""
    contexts: tuple[int, ...] = (32, 512, 2048, 8192)
    """Lengths of each of these sequences."""
    decode_steps: int = 32
    """Number of iterations over which a decode sample is averaged."""
    repeats: int = 5
    """Number of repetitions, of which a sample is the median."""


QUICK = ProfilePlan((16, 128, 512), (0, 256), (1, 4, 8), (32, 256), decode_steps=8, repeats=2)
"""A plan that takes seconds on a small model. It shows that profiling works; its result is not reliable."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted model, and the samples to which it was fitted."""

    model: CostModel
    steps: StepCosts
    samples: tuple[StepSample, ...]

    def predicted_s(self, sample: StepSample) -> float:
        """Return the seconds that the model predicts for a sample, with the requests' own part."""
        step_s = self.model.step_s(sample.tokens, sample.context, sample.sequences, sample.pairs)
        return step_s + sample.requests * self.steps.request_s

    def evidence(self) -> dict[str, Any]:
        """Return what is written beside the model into its file."""
        return {"fit": self.steps, "samples": self.samples}


async def profile_engine(
    name: str,
    arguments: Mapping[str, Any],
    plan: ProfilePlan,
    report: Callable[[StepSample], None] = lambda sample: None,
    clock: Clock | None = None,
) -> Profile:
    """Start an engine, measure it, and stop it.

    Args:
        name: name of the resulting model.
        arguments: vLLM's engine arguments. Those of the OpenAI server are ignored.
        plan: what to measure.
        report: called with each sample after its measurement.
        clock: the clock to measure with. None is the monotonic clock.

    Raises:
        ConfigError: the engine is too small for the plan, or its times are not valid.
    """
    known = {field.name for field in fields(AsyncEngineArgs)}
    engine_args = AsyncEngineArgs(**{key: value for key, value in arguments.items() if key in known})
    config = engine_args.create_engine_config()
    in_one_process(config, engine_args)
    engine = AsyncLLM.from_vllm_config(config)
    try:
        stopwatch = _Stopwatch(engine, plan, clock or MonotonicClock())
        samples = []
        async for sample in stopwatch.samples():
            samples.append(sample)
            report(sample)
        kv_bytes = _kv_bytes_per_token(engine.vllm_config)
        swap_token_s, swap_overhead_s = _swap_costs(engine.vllm_config, kv_bytes, stopwatch.clock)
        steps = fit_steps(samples)
        model = steps.cost_model(
            name,
            kv_bytes_per_token=kv_bytes,
            kv_capacity_tokens=stopwatch.capacity,
            swap_token_s=swap_token_s,
            swap_overhead_s=swap_overhead_s,
            step_tokens=stopwatch.max_step,
            step_sequences=stopwatch.max_sequences,
        )
        return Profile(model, steps, tuple(samples))
    finally:
        engine.shutdown()


class _Stopwatch:
    """Times the requests of a plan on one engine, one batch at a time."""

    def __init__(self, engine: AsyncLLM, plan: ProfilePlan, clock: Clock) -> None:
        config = engine.vllm_config
        self.engine, self.plan, self.clock = engine, plan, clock
        self.max_step = config.scheduler_config.max_num_batched_tokens
        self.max_sequences = config.scheduler_config.max_num_seqs
        self.max_length = config.model_config.max_model_len
        self.capacity = int(config.cache_config.num_gpu_blocks * config.cache_config.block_size)
        self._vocabulary = config.model_config.get_vocab_size()
        self._random = np.random.default_rng(0)
        self._requests = 0

    async def samples(self) -> AsyncIterator[StepSample]:
        """Yield each sample of the plan that the engine's bounds allow.

        Raises:
            ConfigError: they allow none.
        """
        prefills, decodes = list(self._prefills()), list(self._decodes())
        if not prefills or not decodes:
            raise ConfigError(
                f"nothing to measure within {self.max_step} tokens a step, {self.max_length} tokens a sequence and"
                f" {self.capacity} tokens of KV memory"
            )
        await self._prefill(*prefills[0])  # the first times include compilation and allocation
        await self._decode(*decodes[0])
        for new, cached in prefills:
            yield _median(await self._prefill(new, cached))
        for batch, context in decodes:
            yield _median(await self._decode(batch, context))

    def _prefills(self) -> Iterator[tuple[int, int]]:
        longest = min(self.max_length, self.capacity) - 1
        for cached in self.plan.cached:
            for new in self.plan.prompts:
                if new <= self.max_step and cached + new <= longest:
                    yield new, cached

    def _decodes(self) -> Iterator[tuple[int, int]]:
        # Until all have begun, the first ones go on: twice the steps, and one for each admission, is room enough.
        for context in self.plan.contexts:
            for batch in self.plan.batches:
                length = context + 2 * self.plan.decode_steps + batch
                if batch <= self.max_sequences and length <= self.max_length and batch * length <= self.capacity:
                    yield batch, context

    async def _prefill(self, new: int, cached: int) -> list[StepSample]:
        """Measure the time to a prompt's only token ``repeats`` times, and count the real hits of the prefix cache."""
        known = self._tokens(cached)
        if cached:
            await self._first_token(known)
        samples = []
        for _ in range(self.plan.repeats):
            prompt = [*known, *self._tokens(new)]
            begun_s = self.clock.now_s()
            hits = await self._first_token(prompt)
            seconds = self.clock.now_s() - begun_s
            tokens = len(prompt) - hits
            pairs = tokens * (2 * len(prompt) - tokens + 1) / 2
            samples.append(StepSample(tokens, len(prompt), 1, pairs, seconds, requests=1))
        return samples

    async def _decode(self, batch: int, context: int) -> list[StepSample]:
        """Measure the time between tokens of ``batch`` sequences that all decode, ``repeats`` times."""
        prompts = [self._tokens(context) for _ in range(batch)]
        for prompt in prompts:
            await self._first_token(prompt)  # with cached prompts, all of them begin within a few steps
        samples = []
        for _ in range(self.plan.repeats):
            window = _Window(batch, self.plan.decode_steps, self.clock)
            await asyncio.gather(*(self._stream(i, prompt, window) for i, prompt in enumerate(prompts)))
            if not window.closed:
                raise ConfigError(f"{batch} sequences of {context} tokens never decoded together")
            length = batch * context + window.generated
            samples.append(StepSample(batch, length, batch, float(length), window.seconds_per_step))
        return samples

    async def _first_token(self, prompt: list[int]) -> int:
        """Run a request of one token. Return how many of its prompt's tokens were in the prefix cache."""
        params = SamplingParams(max_tokens=1, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        hits = 0
        async for output in self.engine.generate({"prompt_token_ids": prompt}, params, self._request_id()):
            hits = output.num_cached_tokens or 0
        return hits

    async def _stream(self, index: int, prompt: list[int], window: "_Window") -> None:
        """Generate until the window closes, then abort."""
        longest = self.max_length - len(prompt)
        params = SamplingParams(max_tokens=longest, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = self.engine.generate({"prompt_token_ids": prompt}, params, self._request_id())
        async with aclosing(stream):
            async for output in stream:
                window.count(index, len(output.outputs[0].token_ids))
                if window.closed:
                    return

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(FIRST_TOKEN_ID, self._vocabulary, count).tolist()
        return ids

    def _request_id(self) -> str:
        self._requests += 1
        return f"profile-{self._requests}"


class _Window:
    """The steps in which all sequences of a batch decode. It opens with the first token of the last sequence."""

    def __init__(self, batch: int, steps: int, clock: Clock) -> None:
        self._counts = [0] * batch
        self._steps, self._clock = steps, clock
        self._last: int | None = None
        self._opened_s = 0.0
        self._at_opening = 0
        self._until = 0
        self.closed = False
        self.seconds_per_step = 0.0
        self.generated = 0
        """Generated tokens of the whole batch, at the middle of the window."""

    def count(self, index: int, tokens: int) -> None:
        """Count ``tokens`` new tokens of a sequence. Several come at once when its reader is slow."""
        self._counts[index] += tokens
        if self.closed:
            return
        if self._last is None:
            if all(self._counts):
                self._last, self._opened_s = index, self._clock.now_s()
                self._at_opening, self._until = sum(self._counts), self._counts[index] + self._steps
        elif index == self._last and self._counts[index] >= self._until:
            steps = self._steps + self._counts[index] - self._until
            self.seconds_per_step = (self._clock.now_s() - self._opened_s) / steps
            self.generated = self._at_opening + len(self._counts) * steps // 2
            self.closed = True


def _median(samples: list[StepSample]) -> StepSample:
    """Return the sample with the median time, or the faster one of the two in the middle."""
    middle = statistics.median_low(sample.seconds for sample in samples)
    return next(sample for sample in samples if sample.seconds == middle)


def _kv_bytes_per_token(config: Any) -> int:
    """Return the bytes of all ranks, for attention that keeps a key and a value for each layer and KV head."""
    model = config.model_config
    numbers = 2 * model.get_total_num_hidden_layers() * model.get_total_num_kv_heads() * model.get_head_size()
    return int(numbers * get_dtype_size(kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model)))


def _swap_costs(config: Any, kv_bytes_per_token: int, clock: Clock) -> tuple[float, float]:
    """Return the swap costs, one way: seconds for one token's KV, and seconds for any transfer.

    Each rank has its own host link.
    """
    on_gpu = config.device_config.device_type == "cuda"
    small_s, large_s = (_copy_s(size, on_gpu, clock) for size in SWAP_BYTES)
    byte_s = max(large_s - small_s, 0.0) / (SWAP_BYTES[1] - SWAP_BYTES[0]) or large_s / SWAP_BYTES[1]
    ranks = config.parallel_config.tensor_parallel_size if on_gpu else 1
    return byte_s * kv_bytes_per_token / ranks, max(small_s - byte_s * SWAP_BYTES[0], 0.0)


def _copy_s(size: int, on_gpu: bool, clock: Clock) -> float:
    """Return the least seconds of a few copies of ``size`` bytes from the device to the host.

    On CPU both are memory.
    """
    device = torch.ones(size, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    times = []
    for _ in range(SWAP_REPEATS):
        begun_s = clock.now_s()
        host.copy_(device)
        times.append(clock.now_s() - begun_s)
    return min(times)
