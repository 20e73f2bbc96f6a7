"""How long a replica's work takes and what its KV cache costs: one form for presets and for measured engines.

A forward pass alternates linear layers and attention, each with its own roofline:

    t = overhead + sequences · sequence + max(weights, tokens · token) + max(context · context, pairs · pair)

The linear layers read all weights, whatever the batch, or compute on each scheduled token; attention reads the KV of
each sequence once, or computes on each pair of a new token and one that it attends to. Where the linear layers' roofs
meet is the saturation point S of InferCept (section 4.3): scheduled tokens are all but free below it. Times are
seconds, lengths tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from cluster.core.errors import ConfigError

FILE_KEY = "cost_model"
"""The key of a saved file under which the cost model stands; beside it may stand what it was fitted to."""

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class CostModel:
    """One replica: all its tensor-parallel ranks together. Pure, picklable, the same after a journey through JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    """Whose costs these are: a preset's name, or what was measured."""
    kv_bytes_per_token: Positive
    """M: keys and values of one token in all layers, of all ranks."""
    kv_capacity_tokens: Annotated[int, Field(gt=0)]
    """Tokens whose KV fits the memory of the replica."""
    overhead_s: NotNegative
    """Seconds of an iteration before any work: scheduling, launches, sampling."""
    sequence_s: NotNegative
    """Seconds for each sequence of the batch: its bookkeeping on the host."""
    weights_s: NotNegative
    """Seconds to read the weights once: the linear layers' memory roof."""
    token_s: Positive
    """Seconds of the linear layers for each scheduled token: their compute roof."""
    context_s: NotNegative
    """Seconds to read one token's KV: attention's memory roof."""
    pair_s: NotNegative
    """Seconds for one new token to attend to one token: attention's compute roof."""
    swap_token_s: Positive
    """Seconds to move one token's KV over the host link, one way."""
    swap_overhead_s: NotNegative = 0.0
    """Seconds of a transfer of any size, one way."""
    turn_s: NotNegative = 0.0
    """Seconds of a turn's way from its client to the scheduler and back, in no step: latency, not work."""

    def step_s(self, scheduled_tokens: int, context_tokens: int, sequences: int, pairs: float | None = None) -> float:
        """T_fwd(n): seconds of one iteration.

        Args:
            scheduled_tokens: new tokens, over all sequences.
            context_tokens: the sequences' lengths after the step, added up: the KV that attention reads, the new
                tokens' own included. Never less than ``scheduled_tokens``.
            sequences: sequences that have a token scheduled.
            pairs: pairs of a new token and one it attends to, itself included; None takes sequences that are all
                alike, which is exact for one prompt and for any decode, too much for long contexts beside a prompt.
        """
        tokens = scheduled_tokens
        if tokens <= 0:
            return self.overhead_s
        context = context_tokens if context_tokens > tokens else tokens
        if pairs is None:
            pairs = tokens * (2 * context - tokens + sequences) / (2 * sequences)
        linear = tokens * self.token_s
        if linear < self.weights_s:
            linear = self.weights_s
        attention = context * self.context_s
        if attention < pairs * self.pair_s:
            attention = pairs * self.pair_s
        return self.overhead_s + sequences * self.sequence_s + linear + attention

    def prefill_s(self, tokens: int, context_tokens: int = 0, chunk_tokens: int | None = None) -> float:
        """T_fwd(C): seconds to compute ``tokens`` of one sequence, alone on the device.

        Args:
            tokens: tokens to compute.
            context_tokens: tokens before them whose KV is there.
            chunk_tokens: no iteration schedules more; None does all in one.
        """
        if tokens <= 0:
            return 0.0
        if chunk_tokens is None or tokens <= chunk_tokens:
            return self.step_s(tokens, context_tokens + tokens, 1)
        chunk = max(1, chunk_tokens)
        full, rest = divmod(tokens, chunk)
        seconds = self._chunks_s(full, chunk, context_tokens)
        return seconds + (self.step_s(rest, context_tokens + tokens, 1) if rest else 0.0)

    def decode_step_s(self, sequences: int = 1, context_tokens: int = 0) -> float:
        """T_fwd: seconds of an iteration in which each of ``sequences`` gets one token.

        Args:
            sequences: the batch.
            context_tokens: the lengths of all of them together.
        """
        return self.step_s(sequences, context_tokens, sequences)

    def swap_s(self, tokens: int) -> float:
        """T_swap(n): seconds to move the KV of ``tokens`` over the host link, one way; both ways cost the same."""
        return self.swap_overhead_s + tokens * self.swap_token_s if tokens > 0 else 0.0

    @property
    def saturation_tokens(self) -> int:
        """S: scheduled tokens beyond which an iteration only gets longer: where the linear layers' roofs meet."""
        return max(1, ceil(self.weights_s / self.token_s))

    @property
    def refill_s(self) -> float:
        """Seconds to compute as many tokens as the memory holds, in saturated iterations without attention.

        The break-even time of a hold: memory that is held so long could have been filled with other work.
        """
        return self.kv_capacity_tokens * self.token_s

    def slowed(self, factor: float) -> "CostModel":
        """The same replica, its computation ``factor`` times as slow; the host link and the way to it are as before."""
        return replace(
            self,
            overhead_s=factor * self.overhead_s,
            sequence_s=factor * self.sequence_s,
            weights_s=factor * self.weights_s,
            token_s=factor * self.token_s,
            context_s=factor * self.context_s,
            pair_s=factor * self.pair_s,
        )

    def save(self, path: Path, evidence: Mapping[str, Any] | None = None) -> None:
        """Write as JSON.

        Args:
            path: the file; replaced if it is there.
            evidence: what is to stand beside the model, such as the measurements; :meth:`load` does not read it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            path.write_bytes(to_json({FILE_KEY: self, **(evidence or {})}, indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: no such file, or it holds no cost model; the message names the file and the key.
        """
        try:
            content = from_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(content, dict) or FILE_KEY not in content:
            raise ConfigError(f"{path}: {FILE_KEY}: missing; `caesura profile` writes such files")
        try:
            return _ADAPTER.validate_python(content[FILE_KEY])
        except ValidationError as error:
            lines = (
                f"{path}: {'.'.join((FILE_KEY, *map(str, detail['loc'])))}: {detail['msg']}"
                for detail in error.errors(include_url=False)
            )
            raise ConfigError("\n".join(lines)) from None

    def _chunks_s(self, count: int, chunk: int, context: int) -> float:
        """``count`` iterations of ``chunk`` tokens each, of one sequence that begins with ``context``; in closed form.

        The i-th ends at length context + i · chunk. Attention's roofs are linear in that length and cross at most
        once: the first ``bound`` iterations are bound by memory, the others by compute.
        """
        growth = chunk * self.pair_s - self.context_s
        if growth > 0:
            crossing = chunk * self.pair_s * (chunk - 1) / (2 * growth)
            bound = min(max(ceil((crossing - context) / chunk) - 1, 0), count)
        else:
            bound = count
        memory = bound * context + chunk * bound * (bound + 1) / 2
        lengths = count * context + chunk * count * (count + 1) / 2 - memory
        pairs = chunk * (lengths - (count - bound) * (chunk - 1) / 2)
        fixed = self.overhead_s + self.sequence_s + max(self.weights_s, chunk * self.token_s)
        return count * fixed + memory * self.context_s + pairs * self.pair_s


_ADAPTER = TypeAdapter(CostModel)
