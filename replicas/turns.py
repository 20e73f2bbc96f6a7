"""What a scheduler notes of a turn from its arrival to its end, and what it tells of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request

from cluster.lifecycle import ProgramState
from cluster.lifecycle_events import (
    TurnEnded,
)
from cluster.program import USER_REPLY, WIRE_KEY, ProgramIdentity
from replicas.forecasts import NOTHING_EXPECTED, NOTHING_KNOWN, Features
from replicas.policy import Forecast
from replicas.program_table import TurnStory
from replicas.resumed_grammar import resumed_tokens
from replicas.tool_calls import ToolNames

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler


RECENT = 32
"""Observations that a recent mean is mostly of."""


@dataclass(slots=True)
class RecentMean:
    """Exponentially weighted; of the first few observations the plain mean. 0 before the first."""

    mean: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        """One more."""
        self.count = min(self.count + 1, RECENT)
        self.mean += (value - self.mean) / self.count


@dataclass(slots=True)
class Turn:
    """A request. ``key`` None: it belongs to no program."""

    identity: ProgramIdentity
    key: str | None
    arrived_s: float
    arrived_step: int
    features: Features = NOTHING_KNOWN
    forecast: Forecast = NOTHING_EXPECTED
    admitted_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    """Prompt tokens that needed no computation at the first admission."""


def turn_of(scheduler: "AgentScheduler", request: Request) -> Turn:
    """Whose turn a request is. What cannot be read is counted, and the request has no program."""
    extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
    try:
        identity = ProgramIdentity.decode(extra[WIRE_KEY]) if WIRE_KEY in extra else ProgramIdentity()
    except ValueError:
        scheduler.counters["unreadable_identity"] += 1
        identity = ProgramIdentity()
    # Without Caesura's ingress in front (vLLM's own server, offline use) the session is the program.
    key = identity.key or request.session_id
    return Turn(identity, key, scheduler.clock.now_s(), scheduler.current_step)


def tool_name_reader(model_config: Any, parser: str | None) -> ToolNames | None:
    """Loaded at start: the first turn that needs it must not stop the engine. None where vLLM has no tokenizer."""
    return None if model_config.skip_tokenizer_init else ToolNames(cached_tokenizer_from_config(model_config), parser)


def tools_of(scheduler: "AgentScheduler", request: Request, turn: Turn) -> tuple[str, ...]:
    """What a finished turn asks for: as its client said, else as its output says, else it waits for its user."""
    if turn.identity.hints.expected_tool is not None:
        return (turn.identity.hints.expected_tool,)
    named = scheduler.tool_names(_output_ids(request)) if scheduler.tool_names else ()
    return named or (USER_REPLY,)


def _output_ids(request: Request) -> Sequence[int]:
    """All that the turn generated, here and, if it was resumed, elsewhere."""
    known = resumed_tokens(request)
    ids: Sequence[int] = request.all_token_ids if known else request.output_token_ids
    return ids[request.num_prompt_tokens - known :] if known else ids


def ended(
    scheduler: "AgentScheduler", program: ProgramState, request: Request, turn: Turn, tools: tuple[str, ...]
) -> TurnEnded:
    """The event of a turn that ran its course; the forecaster learns from it."""
    now_s = scheduler.clock.now_s()
    served = request.num_tokens - turn.cached_tokens
    total = program.served_tokens + served
    scheduler.forecaster.turn_ended(program.key, turn.features, request.num_output_tokens, total)
    bound_s = scheduler.settings.slo.ttft_s
    waited_s = (now_s if turn.first_token_s is None else turn.first_token_s) - turn.arrived_s
    on_time = bound_s is None or waited_s <= bound_s
    scheduler.on_time.observe(program.on_time and on_time)
    return TurnEnded(
        now_s,
        tools,
        served_tokens=served,
        context_tokens=request.num_tokens,
        generated_tokens=request.num_output_tokens,
        busy_s=now_s - turn.arrived_s,
        on_time=on_time,
    )


def story_of(request: Request, turn: Turn, now_s: float, tools: tuple[str, ...], decision: str) -> TurnStory:
    """What is told of a turn that has ended."""
    admitted_s = now_s if turn.admitted_s is None else turn.admitted_s
    return TurnStory(
        request_id=request.request_id,
        arrived_s=turn.arrived_s,
        queue_s=admitted_s - turn.arrived_s,
        run_s=now_s - admitted_s,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=turn.cached_tokens,
        output_tokens=request.num_output_tokens,
        preemptions=request.num_preemptions,
        priority=turn.identity.hints.priority,
        tools=tools,
        outcome=str(request.status).removeprefix("FINISHED_").lower(),
        decision=decision,
    )
