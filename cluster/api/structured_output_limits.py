"""Limits on the schemas, grammars and regular expressions that an engine compiles for a request.

vLLM compiles them on few threads and cannot stop a compilation. A few very large ones, even of aborted requests, can
therefore block all structured output of a replica. With xgrammar and a vocabulary of 131,000 tokens, a property costs
about 1 ms, a pair of optional properties 10 µs, since any of them may follow any other, and a position of a bounded
string (`maxLength`, `.{0,n}`) about 50 ms. What is within these limits, and is not small, is tried by the replica in a
process that can be ended (`replicas.grammar_trials`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.api.schema_keywords import check_schema
from cluster.core.errors import BadRequest

MAX_CHARACTERS = 64 << 10
"""Maximum number of characters of the names, values and patterns of one request. Descriptions are not compiled and do
not count."""
MAX_PARTS = 5000
"""Maximum number of parts: keys and list items of a schema, choices, and alternatives of a grammar or a regular
expression."""
MAX_STATES = 1024
"""Maximum number of automaton states of bounded repetitions, as estimated."""
STATES_OF_ONE = 256
"""Maximum number of states that one bounded repetition counts. Beyond it the cost hardly grows, even if nested."""

PART_S, PAIR_S, STATE_S = 0.001, 1e-5, 0.05
"""Estimated seconds of a part, of a pair of optional properties and of a state, with a vocabulary of 131,000 tokens."""

SMALL_S = 0.25
"""Estimated seconds up to which a compilation counts as small."""

CODE = "structured_output_too_complex"
TO_COMPILE = "to compile, which is the limit for one request"
"""Part of a replica's message about a grammar that takes too much time or memory. Clients get `CODE` with it."""

_AS_TEXT = frozenset({"json", "structural_tag"})
"""Keys of `structured_outputs` whose value may be JSON in a string."""
_ANNOTATIONS = frozenset({"title", "description", "$comment"})
_LENGTHS = ("minLength", "maxLength")
_PATTERNS = frozenset({"pattern", "regex", "grammar"})
_REPETITION = re.compile(r"\{\s*+(\d*+)\s*+,?\s*+(\d*+)\s*+\}")
"""Its quantifiers give nothing back, so that a search takes linear time, whatever the pattern is."""


def check_structured_output(body: Mapping[str, Any]) -> None:
    """Reject a request whose schemas, grammars or patterns would take too long to compile, or cannot be enforced.

    Args:
        body: the body of a chat completion, a completion or a response. vLLM rejects fields of a wrong type.

    Raises:
        BadRequest: a limit is exceeded, or a schema cannot be satisfied, or a strict one cannot be enforced (400).
            `param` names the field.
    """
    for param, compiled in _compiled(body):
        _check(param, compiled)
    for param, schema, is_strict in _schemas(body):
        check_schema(param, schema, is_strict)


def estimated_s(spec: str) -> float:
    """Return the estimated time to compile a schema, structural tag (JSON), grammar or regular expression, in seconds.

    Costs above the limits of this module are not counted.
    """
    cost = _Cost()
    cost.add({"json": spec, "grammar": spec} if _parsed(spec) is None else {"json": spec})
    return cost.seconds


def is_surely_small(schema: str) -> bool:
    """Return whether a JSON schema compiles fast, whatever is in it: it is small and has no patterns."""
    cost = _Cost()
    cost.add({"json": schema})
    return not cost.patterns and cost.seconds <= SMALL_S


def _compiled(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that the engine compiles for this request, each with the name of its field."""
    for param in ("response_format", "structured_outputs"):
        if isinstance(body.get(param), Mapping):
            yield param, body[param]
    text = body.get("text")
    if isinstance(text, Mapping) and isinstance(text.get("format"), Mapping):
        yield "text.format", text["format"]
    tools = body.get("tools")
    if isinstance(tools, list):
        choice = body.get("tool_choice")
        is_forced = choice == "required" or isinstance(choice, Mapping)
        # Chat completions have a tool's fields in its `function`, responses beside its `type`.
        functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
        yield (
            "tools",
            [
                function.get("parameters")
                for function in functions
                if isinstance(function, Mapping) and (is_forced or function.get("strict") is True)
            ],
        )


def _schemas(body: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the schemas that the output of this request must match, each with the name of its field and whether it is
    strict.
    """
    for param, wanted in (
        ("response_format.json_schema", _at(body, "response_format", "json_schema")),
        ("text.format", _at(body, "text", "format")),
    ):
        if isinstance(wanted, Mapping):
            yield f"{param}.schema", wanted.get("schema"), wanted.get("strict") is True
    # This field is vLLM's own, and has no flag: it promises that the output matches.
    yield "structured_outputs.json", _parsed(_at(body, "structured_outputs", "json")), True
    tools, choice = body.get("tools"), body.get("tool_choice")
    is_forced = choice == "required" or isinstance(choice, Mapping)
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, Mapping) and choice != "none":
            # Chat completions have a tool's fields in its `function`, responses beside its `type`.
            function, place = (tool["function"], ".function") if "function" in tool else (tool, "")
            if isinstance(function, Mapping) and (is_forced or function.get("strict") is True):
                parameters = function.get("parameters")
                yield f"tools.{number}{place}.parameters", parameters, function.get("strict") is True


def _at(body: Mapping[str, Any], *keys: str) -> Any:
    here: Any = body
    for key in keys:
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


def _check(param: str, compiled: Any) -> None:
    cost = _Cost()
    cost.add(compiled)
    if (exceeded := cost.exceeded) is not None:
        what, limit = exceeded
        message = f"{param}: has more than {limit} {what}, which is the limit for one request"
        raise BadRequest(message, param=param, code=CODE)


class _Cost:
    """The estimated cost of a compilation. It is counted until it exceeds a limit."""

    def __init__(self) -> None:
        self.characters = self.parts = self.pairs = self.states = self.patterns = 0

    @property
    def seconds(self) -> float:
        """Seconds that one core is expected to compile for, from the counts so far."""
        return self.parts * PART_S + self.pairs * PAIR_S + self.states * STATE_S

    @property
    def exceeded(self) -> tuple[str, int] | None:
        """What there is too much of, and the limit; None: no limit is exceeded."""
        found = (
            ("characters", self.characters, MAX_CHARACTERS),
            ("properties, values and alternatives", self.parts, MAX_PARTS),
            ("states of bounded repetitions", self.states, MAX_STATES),
        )
        return next(((what, limit) for what, cost, limit in found if cost > limit), None)

    def add(self, compiled: Any) -> None:
        """Add the cost of a schema, or of an object that contains schemas, grammars and patterns."""
        left = [compiled]
        while left and self.exceeded is None:
            value = left.pop()
            if isinstance(value, str):
                self.characters += len(value)
            elif isinstance(value, list):
                self.parts += len(value)
                left += value[: MAX_PARTS + 1]
            elif isinstance(value, Mapping):
                self.parts += len(value)
                if self.parts > MAX_PARTS:
                    return
                self.states += max((_length(value.get(key)) for key in _LENGTHS), default=0)
                self.pairs += _optional(value) ** 2
                left += [part for key, part in value.items() if self._is_left(key, part)]
                left += [_parsed(value[key]) for key in _AS_TEXT & value.keys()]

    def _is_left(self, key: str, part: Any) -> bool:
        """Add the cost of a key, and of its value if that is a pattern. Return whether the value is still to be
        added.
        """
        self.characters += len(key)
        self.patterns += key == "patternProperties"
        if key in _AS_TEXT:
            return False
        if key in _PATTERNS and isinstance(part, str):
            self.patterns += 1
            # Quoted and escaped text in a pattern counts too.
            self.parts += part.count("|")
            for repetition in _REPETITION.finditer(part):
                self.states += max(_length(int(bound[:9] or 0)) for bound in repetition.groups())
        return not (key in _ANNOTATIONS and isinstance(part, str))


def _optional(schema: Mapping[str, Any]) -> int:
    """Return the number of properties that an object need not have."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    return max(0, len(properties) - (len(required) if isinstance(required, list) else 0))


def _length(bound: Any) -> int:
    return int(min(bound, STATES_OF_ONE)) if isinstance(bound, int | float) and bound > 0 else 0


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None  # vLLM rejects it
