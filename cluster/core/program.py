"""The types that describe the program of a request: identity, the client's hints, and predictions."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MAX_ID_LENGTH = 256
"""Maximum length of a program, parent or tenant id (characters). Longer ids are rejected."""

DEFAULT_TENANT = "default"

RECORD_TOKENS = "tokens"
"""What a client can ask to be recorded of a turn: its token ids and the log probabilities of its output."""

USER_REPLY = "user_reply"
"""The tool name for a turn that calls no tool and is not the last. The program then waits for its user."""

WIRE_KEY = "caesura"
"""The key of ``vllm_xargs`` (``SamplingParams.extra_args``) under which a ProgramIdentity reaches the scheduler."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints that a client gives about a turn, beside its identity. None: the client did not give this hint."""

    priority: int | None = None
    """Priority of the turn. The lowest value runs first, as in vLLM."""
    expected_output_tokens: int | None = None
    deadline_s: float | None = None
    """Seconds from the turn's arrival, within which the turn should end."""
    expected_tool: str | None = None
    """Name of the tool that this turn will call."""
    last_tool: str | None = None
    """Name of the tool whose result is in this turn's prompt."""
    expected_pause_s: float | None = None
    """Seconds that the tool called by this turn is expected to take."""
    expected_returned_tokens: int | None = None
    """Prompt tokens that the next turn will add."""
    expected_later_tokens: int | None = None
    """Tokens, of prompts and outputs, that the program's later turns will need computed."""
    expected_later_turns: int | None = None
    """Turns that the program has after this one."""
    retention_s: float | None = None
    """Seconds for which the client asks to keep the program's KV cache after this turn."""

    @property
    def sheddable(self) -> bool:
        """Whether the client lets the turn wait for all others, as batch work can: its priority is above 0."""
        return (self.priority or 0) > 0


@dataclass(frozen=True, slots=True)
class ToolPrediction:
    """A tool that a turn may call."""

    tool: str
    """The key of the tool in the tool statistics, see `tool_key`."""
    share: float
    """Probability that the turn calls this tool."""
    pause_s: float
    """Expected duration of the pause if the turn calls this tool (seconds)."""
    returned_tokens: float
    """Expected prompt tokens that the next turn adds if the turn calls this tool."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of a turn, used where the client gave no hint. Values are means, except `p50` and `p90`."""

    output_tokens: float
    output_p90_tokens: float
    pause_s: float
    """Mean pause over the tools that the turn may call (seconds). Calling no tool counts as 0 s."""
    pause_p50_s: float
    """Median pause if the turn calls a tool (seconds)."""
    returned_tokens: float
    later_tokens: float
    """Tokens, of prompts and outputs, that the program's later turns will need computed."""
    later_turns: float
    tools: tuple[ToolPrediction, ...] = ()
    """The most probable tools, in descending order of probability. Less probable tools are left out."""

    def tool(self, key: str | None) -> ToolPrediction | None:
        """Return the prediction for the case that the turn calls this tool; None: there is none."""
        return next((one for one in self.tools if one.tool == key), None)

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> "Prediction":
        """Make a prediction from the fields that `dataclasses.asdict` and JSON made of one.

        Raises:
            TypeError: ``fields`` are not the fields of a prediction.
        """
        return cls(**{**fields, "tools": tuple(ToolPrediction(**one) for one in fields.get("tools", ()))})


@dataclass(frozen=True, slots=True)
class ProgramIdentity:
    """The program of a request. ``program_id`` None: it names no program, and counts as a program of one turn."""

    program_id: str | None = None
    parent_id: str | None = None
    tenant: str = DEFAULT_TENANT
    first_turn: bool = field(default=False, compare=False)
    """The program probably begins with the turn: no answer precedes it, or its program's id was made for it. It is not
    encoded, since only the router reads it."""
    last_turn: bool = False
    record: str | None = None
    """`RECORD_TOKENS`: the exact tokens of the turn are recorded. None: they are not."""
    hints: Hints = field(default_factory=Hints)
    forecast: Prediction | None = None
    """The cluster's own prediction, never a client's. Where the client gave a hint, the hint is used instead."""
    traceparent: str | None = None
    """Parent of the turn's spans, as a W3C `traceparent` header; None: the turn is not traced, or its spans belong to
    its
    program's trace."""

    def yielding(self) -> "ProgramIdentity":
        """Return the identity with a priority that yields to the turns of all others, see `Hints.sheddable`."""
        return replace(self, hints=replace(self.hints, priority=max(1, self.hints.priority or 1)))

    @property
    def key(self) -> str | None:
        """The program's id in the cluster, which is `TENANT/PROGRAM`; None: the request names no program."""
        return None if self.program_id is None else f"{self.tenant}/{self.program_id}"

    @property
    def parent_key(self) -> str | None:
        """The id in the cluster of the program that started this one; None: the request names none."""
        return None if self.parent_id is None else f"{self.tenant}/{self.parent_id}"

    def encode(self) -> str:
        """Encode the identity as JSON, without the fields that are None."""
        fields = asdict(self)
        del fields["first_turn"]
        return json.dumps(_without_none(fields), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "ProgramIdentity":
        """Decode what :meth:`encode` wrote.

        Raises:
            ValueError: ``text`` is not an encoded identity.
        """
        try:
            fields = json.loads(text)
            hints = Hints(**fields.get("hints", {}))
            forecast = Prediction.decode(fields["forecast"]) if "forecast" in fields else None
            return cls(**{**fields, "hints": hints, "forecast": forecast})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not an encoded program identity: {text[:200]!r}") from error


CLASS_MARK = ":"
"""The separator between a tool's name and the class of its arguments, as in ``bash:grep``. No tool's name contains
it."""


KEY_MARK = "+"
"""The separator between the tools of a key, as in ``bash:cd+search``."""


def tenant_of(key: str) -> str:
    """Return the tenant of a program's key (`ProgramIdentity.key`). A tenant's name has no slash."""
    return key.partition("/")[0]


def without_class(key: str) -> str:
    """Return the key without classes of arguments. ``bash:grep`` and ``bash:cd+bash:ls`` both give ``bash``."""
    if CLASS_MARK not in key:
        return key
    return tool_key(tuple(name.partition(CLASS_MARK)[0] for name in key.split(KEY_MARK)))


def tool_key(tools: tuple[str, ...]) -> str:
    """Return the key of the duration statistics of tools that one turn calls together, in any order."""
    return KEY_MARK.join(sorted(set(tools)))[:MAX_ID_LENGTH]


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    pruned = {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}
    return {k: v for k, v in pruned.items() if v != {}}
