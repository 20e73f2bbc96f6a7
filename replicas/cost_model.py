"""The cost model: how long a replica's work takes, and how much KV cache it needs.

Presets and measured engines use the same form. A forward pass alternates linear layers and attention:

    t = overhead + sequences · sequence + max(weights, tokens · token) + context · context + pairs · pair

The linear layers either read all weights, whatever the batch, or compute on each scheduled token. Attention reads the
KV of each sequence once, and computes on each pair of a new token and a token that it attends to. Both times of
attention are added, because the kernels of prompts and those of decodes run one after the other. The two roofs of the
linear layers meet at the saturation point S of InferCept (section 4.3): below it, more scheduled tokens hardly make an
iteration longer. Times are in seconds and lengths in tokens.
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
"""Key of the cost model in a saved file. Other keys may hold the data to which it was fitted."""

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one replica, all its tensor-parallel ranks together. It is picklable, and JSON preserves it exactly."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    """Name of the preset or of the measured engine."""
    kv_bytes_per_token: Positive
    """M: bytes of the keys and values of one token in all layers, of all ranks together."""
    kv_capacity_tokens: Annotated[int, Field(gt=0)]
    """Tokens whose KV fits into the memory of the replica."""
    overhead_s: NotNegative
    """Seconds of an iteration that do not depend on its work: scheduling, kernel launches, sampling."""
    sequence_s: NotNegative
    """Seconds for each sequence of the batch: its bookkeeping on the host."""
    weights_s: NotNegative
    """Seconds to read the weights once. This is the memory roof of the linear layers."""
    token_s: Positive
    """Seconds of the linear layers for each scheduled token. This is their compute roof."""
    context_s: NotNegative
    """Seconds to read one token's KV."""
    pair_s: NotNegative
    """Seconds for one new token to attend to one token. A decode takes ``context_s + pair_s`` for each token of its
    context."""
    swap_token_s: Positive
    """Seconds to move one token's KV over the host link, one way."""
    swap_overhead_s: NotNegative = 0.0
    """Seconds that a transfer of any size takes in addition, one way."""
    turn_s: NotNegative = 0.0
    """Seconds that a turn spends between its client and the scheduler, both ways. This is latency and not part of a
    step."""
    step_tokens: Annotated[int, Field(gt=0)] = 2048
    """Tokens of a step at most, by the engine's default on this device. The simulator uses it; an engine that serves
    has its own argument."""
    step_sequences: Annotated[int, Field(gt=0)] = 256
    """Sequences of a step at most, likewise."""

    def step_s(self, scheduled_tokens: int, context_tokens: int, sequences: int, pairs: float | None = None) -> float:
        """Return T_fwd(n), the seconds of one iteration.

        Args:
            scheduled_tokens: new tokens, over all sequences.
            context_tokens: sum of the sequences' lengths after the step, that is the KV that attention reads, with the
                new tokens. It is never less than ``scheduled_tokens``.
            sequences: number of sequences that have a token scheduled.
            pairs: number of pairs of a new token and a token that it attends to, itself included. None assumes that all
                sequences are alike. This is exact for one prompt and for any decode; it is too large for long contexts
                beside a prompt.
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
        attention = context * self.context_s + pairs * self.pair_s
        return self.overhead_s + sequences * self.sequence_s + linear + attention

    def prefill_s(self, tokens: int, context_tokens: int = 0, chunk_tokens: int | None = None) -> float:
        """Return T_fwd(C), the seconds to compute ``tokens`` of one sequence that is alone on the device.

        Args:
            tokens: tokens to compute.
            context_tokens: tokens before them whose KV is in memory.
            chunk_tokens: largest number of tokens of an iteration. None computes all in one iteration.
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
        """Return T_fwd, the seconds of an iteration in which each of ``sequences`` gets one token.

        Args:
            sequences: size of the batch.
            context_tokens: sum of the lengths of the sequences.
        """
        return self.step_s(sequences, context_tokens, sequences)

    def swap_s(self, tokens: int) -> float:
        """Return T_swap(n), the seconds to move the KV of ``tokens`` over the host link, one way.

        Both directions cost the same.
        """
        return self.swap_overhead_s + tokens * self.swap_token_s if tokens > 0 else 0.0

    @property
    def saturation_tokens(self) -> int:
        """S: scheduled tokens beyond which every token makes an iteration longer.

        The linear layers' roofs meet there.
        """
        return max(1, ceil(self.weights_s / self.token_s))

    @property
    def refill_s(self) -> float:
        """Seconds to compute as many tokens as the memory holds, in saturated iterations without attention.

        This is the break-even time of a hold: in this time, other work could have filled the held memory.
        """
        return self.kv_capacity_tokens * self.token_s

    def slowed(self, factor: float) -> "CostModel":
        """Return this replica with computation ``factor`` times as slow. Host link and ``turn_s`` do not change."""
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
        """Write the model as JSON.

        Args:
            path: the file. An existing file is replaced.
            evidence: other keys to write beside the model, such as the measurements. :meth:`load` ignores them.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.write_bytes(to_json({FILE_KEY: self, **(evidence or {})}, indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Read a file that :meth:`save` wrote.

        Raises:
            ConfigError: there is no such file, or it has no valid cost model. The message names the file and the key.
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
        """Return the seconds of ``count`` iterations of ``chunk`` tokens of one sequence, in closed form.

        The sequence begins with ``context`` tokens, and iteration i ends at length context + i · chunk.
        """
        lengths = count * context + chunk * count * (count + 1) / 2
        pairs = chunk * (lengths - count * (chunk - 1) / 2)
        fixed = self.overhead_s + self.sequence_s + max(self.weights_s, chunk * self.token_s)
        return count * fixed + lengths * self.context_s + pairs * self.pair_s


_ADAPTER = TypeAdapter(CostModel)
