"""The words for agent programs: who asks, what is known of a program, how long a turn was."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_ID_LENGTH = 256
"""Characters of a program, parent or tenant id; longer ones are refused."""

DEFAULT_TENANT = "default"

USER_REPLY = "user_reply"
"""The tool name of a turn that asks for no tool and is not the last: the program waits for its user."""

WIRE_KEY = "caesura"
"""The key of ``vllm_xargs`` (``SamplingParams.extra_args``) under which a ProgramIdentity reaches the scheduler."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says of a turn beside its identity. None: not said."""

    priority: int | None = None
    """Least first, as vLLM's."""
    expected_output_tokens: int | None = None
    deadline_s: float | None = None
    """Seconds from the turn's arrival within which it should end."""
    expected_tool: str | None = None
    """Name of the tool that this turn is going to call."""
    last_tool: str | None = None
    """Name of the tool whose result this turn brings back."""
    expected_pause_s: float | None = None
    """Seconds that the tool called by this turn is expected to take."""
    expected_returned_tokens: int | None = None
    """Prompt tokens that the next turn is going to bring."""
    expected_later_tokens: int | None = None
    """Tokens, of prompts and outputs, that the program's later turns will need computed."""
    expected_later_turns: int | None = None
    """Turns that the program has after this one."""
    retention_s: float | None = None
    """Seconds for which the client asks to keep the KV cache after this turn."""


@dataclass(frozen=True, slots=True)
class ToolPrediction:
    """A tool that a turn may call."""

    tool: str
    """A key of tool statistics."""
    share: float
    """Its probability."""
    pause_s: float
    """Expected seconds, if it is this one."""
    returned_tokens: float
    """Expected prompt tokens that it brings, if it is this one."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a predictor expects of a turn: for what its client does not say. Means, unless the name says otherwise."""

    output_tokens: float
    output_p90_tokens: float
    pause_s: float
    """Of the tools that it may call; calling none counts as no pause."""
    pause_p50_s: float
    """If it calls one."""
    returned_tokens: float
    later_tokens: float
    """Tokens, of prompts and outputs, that the program's later turns will need computed."""
    later_turns: float
    tools: tuple[ToolPrediction, ...] = ()
    """The most probable first, not all of them."""

    def tool(self, key: str | None) -> ToolPrediction | None:
        """What is expected if the turn calls this tool; None: nothing is known of that."""
        return next((one for one in self.tools if one.tool == key), None)

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> "Prediction":
        """From what `dataclasses.asdict` and JSON make of one.

        Raises:
            TypeError: ``fields`` are not those.
        """
        return cls(**{**fields, "tools": tuple(ToolPrediction(**one) for one in fields.get("tools", ()))})


@dataclass(frozen=True, slots=True)
class ProgramIdentity:
    """Whose turn a request is. ``program_id`` None: nobody said; a program of one turn."""

    program_id: str | None = None
    parent_id: str | None = None
    tenant: str = DEFAULT_TENANT
    last_turn: bool = False
    hints: Hints = field(default_factory=Hints)
    forecast: Prediction | None = None
    """Comes after the hints: what the client says counts. Of the cluster's own making, never a client's."""
    traceparent: str | None = None
    """What its spans are part of, as W3C's header says it; None: it is not traced, or is its program's."""

    @property
    def key(self) -> str | None:
        """The id that is unique in the cluster: tenant and program; None without a program."""
        return None if self.program_id is None else f"{self.tenant}/{self.program_id}"

    def encode(self) -> str:
        """As JSON, without what was not said."""
        return json.dumps(_without_none(asdict(self)), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "ProgramIdentity":
        """The inverse of :meth:`encode`.

        Raises:
            ValueError: ``text`` is not what :meth:`encode` writes.
        """
        try:
            fields = json.loads(text)
            hints = Hints(**fields.get("hints", {}))
            forecast = Prediction.decode(fields["forecast"]) if "forecast" in fields else None
            return cls(**{**fields, "hints": hints, "forecast": forecast})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not an encoded program identity: {text[:200]!r}") from error


CLASS_MARK = ":"
"""Between a tool's name and the class of its arguments, as in ``bash:grep``; no tool's own name has it."""


KEY_MARK = "+"
"""Between the tools of a key, as in ``bash:cd+search``."""


def without_class(key: str) -> str:
    """The tools of a key whatever their arguments: ``bash`` of ``bash:grep`` and of ``bash:cd+bash:ls``."""
    if CLASS_MARK not in key:
        return key
    return tool_key(tuple(name.partition(CLASS_MARK)[0] for name in key.split(KEY_MARK)))


def tool_key(tools: tuple[str, ...]) -> str:
    """One name for the tools that a turn asks for together, in any order: the key of their duration statistics."""
    return KEY_MARK.join(sorted(set(tools)))[:MAX_ID_LENGTH]


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    pruned = {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}
    return {k: v for k, v in pruned.items() if v != {}}
