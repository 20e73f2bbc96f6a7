"""The scheduler's notes of a turn, and the reader of the tool names in its output.

The tool names are read in the engine's process at the end of a turn. The reader never fails, whatever the text is.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request

from cluster.core.lifecycle.events import TurnEnded
from cluster.core.program import USER_REPLY, WIRE_KEY, ProgramIdentity
from cluster.core.slo import NO_BOUNDS, Slo
from cluster.core.turn_tokens import INITIAL_WEIGHTS
from cluster.durations.tool_names import bounded, classed, tool_names
from replicas.forecasts import NOTHING_KNOWN, Features
from replicas.gpu_time import TurnTime
from replicas.policy import NOTHING_EXPECTED, Forecast
from replicas.program_table import TurnRecord
from replicas.vllm_patches import resumed_tokens, turn_tokens

logger = logging.getLogger(__name__)

RECENT = 32
"""Number of observations that dominate a recent mean."""

MAX_READ_TOKENS = 16_384
"""Largest number of output tokens that are read. They are the last ones."""

TEXT_PARSERS = frozenset(
    (
        "hermes",
        "llama3_json",
        "llama4_json",
        "llama4_pythonic",
        "mistral",
        "openai",
        "pythonic",
        "qwen3_coder",
        "qwen3_xml",
    )
)
"""vLLM tool parsers whose formats `tool_names` reads. For any other name vLLM's own parser is tried first."""


@dataclass(slots=True)
class RecentMean:
    """An exponentially weighted mean. It is the plain mean of the first few observations, and 0 before the first."""

    mean: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.count = min(self.count + 1, RECENT)
        self.mean += (value - self.mean) / self.count


@dataclass(slots=True)
class Turn:
    """A request that waits or runs. ``key`` is None if it belongs to no program."""

    identity: ProgramIdentity
    key: str | None
    arrived_s: float
    queued_step: int
    features: Features = NOTHING_KNOWN
    forecast: Forecast = NOTHING_EXPECTED
    resumes: bool = False
    """Whether a turn of its program had ended when it arrived. It is False for all choices of a first request."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that needed no computation at the first admission."""
    disk_tokens: int = 0
    """Those of them that were loaded from the disk tier."""
    weights: tuple[str, ...] = (INITIAL_WEIGHTS,)
    """Versions of the model's weights that computed its output, in order. The last is that of now."""
    bounds: Slo = NO_BOUNDS
    """Its own bounds: those of its tenant, and its client's deadline. That on its first token follows from its prompt,
    see `Slo.slowdown`."""
    alone_s: float = 0.0
    """Seconds that its first token would take alone, with the KV of its program's context."""
    waits_since_s: float | None = None
    """Time of its last preemption while it waits after one. None: it was never preempted, or it runs."""
    admitted_again_s: float | None = None
    """Time of its last admission after a preemption. None: there was none."""
    waited_s: float = 0.0
    """Seconds that it waited before the admissions so far."""

    def bind(self, slo: Slo, alone_s: float) -> None:
        """Set its bounds: those of such turns, and the seconds that its first token takes alone."""
        self.alone_s, self.bounds = alone_s, replace(slo, ttft_s=slo.ttft_bound_s(alone_s))

    def preempted(self, now_s: float, step: int) -> None:
        """Begin to wait again, at this time and step."""
        self.waits_since_s, self.queued_step = now_s, step

    def admitted(self, now_s: float) -> bool:
        """Begin to run. Return whether it is the first time."""
        if self.admitted_s is None:
            self.admitted_s, self.waited_s = now_s, now_s - self.arrived_s
            return True
        if self.waits_since_s is not None:
            self.waited_s += now_s - self.waits_since_s
            self.waits_since_s, self.admitted_again_s = None, now_s
        return False

    def wait_s(self, now_s: float) -> float:
        """Return the seconds that it has waited for its admissions."""
        if self.admitted_s is None:
            return now_s - self.arrived_s
        return self.waited_s if self.waits_since_s is None else self.waited_s + now_s - self.waits_since_s

    gpu: TurnTime = field(default_factory=TurnTime)

    def is_on_time(self, now_s: float) -> bool:
        """Return whether its first token came within the bound. Without a token, now counts as its time."""
        first_s = now_s if self.first_token_s is None else self.first_token_s
        return self.bounds.ttft_s is None or first_s - self.arrived_s <= self.bounds.ttft_s


def record_of(request: Request, turn: Turn, now_s: float) -> TurnRecord:
    """Return the record of a turn that ends now, without what follows it."""
    admitted_s = now_s if turn.admitted_s is None else turn.admitted_s
    prompt_tokens, output_tokens = turn_tokens(request)
    return TurnRecord(
        request_id=request.request_id,
        arrived_s=turn.arrived_s,
        queue_s=admitted_s - turn.arrived_s,
        run_s=now_s - admitted_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(turn.cached_tokens, prompt_tokens),
        disk_tokens=turn.disk_tokens,
        output_tokens=output_tokens,
        preemptions=request.num_preemptions,
        priority=turn.identity.hints.priority,
        tools=(),
        outcome=str(request.status).removeprefix("FINISHED_").lower(),
        gpu=turn.gpu,
        weights=turn.weights,
    )


def ended_event(request: Request, turn: Turn, tools: tuple[str, ...], now_s: float) -> TurnEnded:
    """Return the event of a turn that is complete."""
    return TurnEnded(
        now_s,
        tools,
        served_tokens=request.num_tokens - turn.cached_tokens,
        context_tokens=request.num_tokens,
        generated_tokens=turn_tokens(request)[1],
        busy_s=now_s - turn.arrived_s,
        on_time=turn.is_on_time(now_s),
    )


def read_identity(request: Request) -> ProgramIdentity:
    """Return the identity that the ingress sent with a request, or an empty one if it sent none.

    Raises:
        ValueError: it cannot be read.
    """
    extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
    return ProgramIdentity.decode(extra[WIRE_KEY]) if WIRE_KEY in extra else ProgramIdentity()


def tools_of(request: Request, turn: Turn, names: "ToolReader | None") -> tuple[str, ...]:
    """Return what a finished turn waits for: the client's hint, else the tools in its output, else the user's reply."""
    if turn.identity.hints.expected_tool is not None:
        return (turn.identity.hints.expected_tool,)
    return (names(_output_ids(request)) if names else ()) or (USER_REPLY,)


def _output_ids(request: Request) -> Sequence[int]:
    """Return all ids that the turn generated, here and, if it was resumed, elsewhere."""
    known = resumed_tokens(request)
    ids: Sequence[int] = request.all_token_ids if known else request.output_token_ids
    return ids[request.num_prompt_tokens - known :] if known else ids


def tool_name_reader(model_config: Any, parser: str | None) -> "ToolReader | None":
    """Return the reader of tool names, or None where vLLM has no tokenizer.

    It is made at the start, so that no turn has to wait for it.
    """
    return None if model_config.skip_tokenizer_init else ToolNames(cached_tokenizer_from_config(model_config), parser)


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of ``ids``."""
        ...


class ToolReader(Protocol):
    """Reads tool names out of the output tokens of a turn."""

    parser_failures: int

    def __call__(self, output_token_ids: Sequence[int], /) -> tuple[str, ...]:
        """Return the names in order."""
        ...


class ToolNames:
    """Reads tool names out of the output tokens of one model.

    Attributes:
        parser_failures: number of times that vLLM's parser or the tokenizer raised. The text formats were read instead
            of what the parser reads, and nothing where there is no text.
    """

    def __init__(self, tokenizer: Decoder, parser_name: str | None) -> None:
        self.parser_failures = 0
        self._tokenizer = tokenizer
        self._parser_name = parser_name
        self._parse: Callable[[str], list[str]] | None = None
        if parser_name is not None and parser_name not in TEXT_PARSERS:
            try:
                self._parse = _vllm_parser(tokenizer, parser_name)
            except Exception as error:  # noqa: BLE001
                # It may need a package, or a special token, that is not there.
                self._fall_back(error)

    def __call__(self, output_token_ids: Sequence[int]) -> tuple[str, ...]:
        """Return the names in order, repeated where a tool is called twice.

        They are empty if the output has no call, or if the tokenizer raises.
        """
        try:
            # Special tokens stay: in some formats they are what marks a call.
            text = self._tokenizer.decode(list(output_token_ids[-MAX_READ_TOKENS:]), skip_special_tokens=False)
        except Exception as error:  # noqa: BLE001
            # A tokenizer may raise on an id that only the model has.
            self._fails("the tokenizer failed, reading no tool calls: %r", error)
            return ()
        if self._parse is not None:
            try:
                names = bounded(self._parse(text))
            except Exception as error:  # noqa: BLE001
                # A parser may raise anything on a model's output, which must not end the engine.
                self._fall_back(error)
            else:
                if names:
                    return names
        return tool_names(text)

    def _fall_back(self, error: Exception) -> None:
        self._fails("tool parser %r failed, reading text formats instead: %r", self._parser_name, error)

    def _fails(self, message: str, *arguments: object) -> None:
        self.parser_failures += 1
        if self.parser_failures == 1:
            logger.warning(message, *arguments)


def _vllm_parser(tokenizer: Decoder, name: str) -> Callable[[str], list[str]]:
    """Return vLLM's parser ``name`` as a function of the text. It raises whatever vLLM raises."""
    # Imported here, as only such a model pays for it (12 MB, 0.8 s).
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    parser_class = ToolParserManager.get_tool_parser(name)
    request = ChatCompletionRequest(messages=[], model="")

    def parse(text: str) -> list[str]:
        # A parser keeps the state of one reply: each reply gets its own.
        calls = parser_class(tokenizer).extract_tool_calls(text, request).tool_calls
        return [classed(call.function.name, call.function.arguments) for call in calls]

    parse("")
    return parse
