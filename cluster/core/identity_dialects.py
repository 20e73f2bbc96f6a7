"""The dialects in which agent clients identify the program of a request: ``DIALECTS``, in order of precedence.

An extractor reads a request and yields claims. It makes no decisions and changes nothing. The sources are vLLM RFC
52113 (`agent_hint`) and router issue 285 (`agentic_context`), NVIDIA Dynamo's request extensions and session headers,
and the clients of Continuum, AIBrix and ThunderAgent.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.core.errors import BadRequest
from cluster.core.program import MAX_ID_LENGTH, RECORD_TOKENS

MAX_NUMBER = 2**31 - 1
"""Largest absolute value of a hint (tokens, seconds or priority). It is the largest integer that every layer below can
carry."""

Value = str | int | float | bool
Reader = Callable[[str, Any], Value | None]
"""A function from a source's name and its raw value to the value that it means; None: it has no value. It raises
BadRequest for an invalid value."""


class Claim(NamedTuple):
    """The value that one source gives for one field."""

    field: str
    """Name of the field of ProgramIdentity or Hints."""
    value: Value
    source: str
    """The header, or the dotted path in the body."""


class Rule(NamedTuple):
    """A field of the identity, the key at which a dialect has it, and the reader of its value."""

    field: str
    key: str
    read: Reader


@dataclass(frozen=True, slots=True)
class Request:
    """The headers and the body that an extractor reads."""

    headers: Mapping[str, str]
    body: Mapping[str, Any]
    _parsed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parsed JSON texts, by path. They are kept because several rules read each text, which may be as long as the
    body."""

    @classmethod
    def of(cls, headers: Mapping[str, str], body: Mapping[str, Any]) -> "Request":
        """Make a request with header names in lower case and with hyphens.

        If a header occurs with hyphens and with underscores, the one with hyphens is used.
        """
        lower = {name.lower(): value for name, value in headers.items()}
        return cls({name.replace("_", "-"): value for name, value in lower.items()} | lower, body)

    def object_at(self, path: str) -> Mapping[str, Any]:
        """Return the object at a dotted path of the body; empty: there is none. The path "" means the body itself.

        Raises:
            BadRequest: something on the path is neither null nor an object.
        """
        here: Mapping[str, Any] = self.body
        walked: list[str] = []
        for key in path.split(".") if path else ():
            walked.append(key)
            here = self._as_object(".".join(walked), here.get(key))
        return here

    def _as_object(self, path: str, value: Any) -> Mapping[str, Any]:
        if value is None:
            return {}
        if path in self._parsed:
            return self._parsed[path]
        if is_text := isinstance(value, str) and path.startswith("vllm_xargs."):
            # Stock vLLM accepts no nested objects there. Clients therefore send them as JSON text.
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"{path} must be a JSON object", param=path) from error
        if not isinstance(value, Mapping):
            raise BadRequest(f"{path} must be an object", param=path)
        if is_text:
            self._parsed[path] = value
        return value


def identifier(source: str, value: Any) -> str | None:
    """Read an id or the name of a tool. An integer is converted to its digits.

    Raises:
        BadRequest: the value is not a string or an integer, has characters that cannot be printed, or is longer than
            MAX_ID_LENGTH characters.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRequest(f"{source} must be a string", param=source)
    if isinstance(value, int) and abs(value) >= 10**MAX_ID_LENGTH:
        raise BadRequest(f"{source} is longer than {MAX_ID_LENGTH} characters", param=source)
    text = str(value).strip()
    if len(text) > MAX_ID_LENGTH:
        raise BadRequest(f"{source} is longer than {MAX_ID_LENGTH} characters", param=source)
    if not text.isprintable():
        raise BadRequest(f"{source} contains characters that cannot be printed", param=source)
    return text or None


def seconds(source: str, value: Any) -> float | None:
    """Read a duration in seconds.

    Raises:
        BadRequest: the value is not a number from 0 to MAX_NUMBER.
    """
    number = _number(source, value)
    if number is not None and number < 0:
        raise BadRequest(f"{source} must not be negative", param=source)
    return None if number is None else float(number)


def integer(source: str, value: Any) -> int | None:
    """Read a whole number.

    Raises:
        BadRequest: the value is not a whole number, or its absolute value is above MAX_NUMBER.
    """
    number = _number(source, value)
    if number is not None and number != int(number):
        raise BadRequest(f"{source} must be a whole number", param=source)
    return None if number is None else int(number)


def tokens(source: str, value: Any) -> int | None:
    """Read a number of tokens or turns.

    Raises:
        BadRequest: the value is not a whole number from 0 to MAX_NUMBER.
    """
    count = integer(source, value)
    if count is not None and count < 0:
        raise BadRequest(f"{source} must not be negative", param=source)
    return count


def higher_first(source: str, value: Any) -> int | None:
    """Read a priority of a dialect in which the highest value runs first.

    It is negated, as in Hints and in vLLM the lowest value runs first.

    Raises:
        BadRequest: the value is not a whole number, or its absolute value is above MAX_NUMBER.
    """
    priority = integer(source, value)
    return None if priority is None else -priority


def flag(source: str, value: Any) -> bool | None:
    """Read a boolean, given as JSON, as 0 or 1, or as text.

    Raises:
        BadRequest: the value is not a boolean.
    """
    word = value.strip().lower() if isinstance(value, str) else value
    if word is None or word == "":
        return None
    for answer, words in ((True, (True, 1, "true", "1")), (False, (False, 0, "false", "0"))):
        if word in words:
            return answer
    raise BadRequest(f"{source} must be true or false", param=source)


def resume_in(source: str, value: Any) -> float | None:
    """Read `expected_resume` as the seconds until the program's next turn. A boolean gives None.

    Raises:
        BadRequest: the value is neither a boolean nor a number from 0 to MAX_NUMBER.
    """
    return None if isinstance(value, bool) else seconds(source, value)


def no_resume(source: str, value: Any) -> bool | None:
    """Read `expected_resume` as a boolean, and return whether this turn is the last. A number gives None."""
    return not value if isinstance(value, bool) else None


def closes(source: str, value: Any) -> bool | None:
    """Read a session's action. `close` means that this turn is the last. Other actions (open, bind) give None.

    Raises:
        BadRequest: the value is not a valid identifier.
    """
    action = identifier(source, value)
    return True if action == "close" else None


def recording(source: str, value: Any) -> str | None:
    """Read what is to be recorded of the turn, which can only be its tokens.

    Raises:
        BadRequest: it is something else.
    """
    what = identifier(source, value)
    if what not in (None, RECORD_TOKENS):
        raise BadRequest(f"{source} must be {RECORD_TOKENS!r}", param=source)
    return what


def _number(source: str, value: Any) -> int | float | None:
    number = value.strip() if isinstance(value, str) else value
    if number is None or number == "":
        return None
    if isinstance(number, str):
        try:
            number = float(number)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise BadRequest(f"{source} must be a number", param=source)
    if not -MAX_NUMBER <= number <= MAX_NUMBER:  # NaN is rejected here too, since all its comparisons are false
        raise BadRequest(f"{source} must be a number within {MAX_NUMBER}", param=source)
    return number


Extractor = Callable[[Request], Iterator[Claim]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One format in which clients identify the program of a request."""

    name: str
    extract: Extractor
    consumes: tuple[str, ...] = ()
    """Dotted paths of the body that only Caesura reads. They are removed, because vLLM would reject or misread them."""


def _claims(read: Mapping[str, Any], prefix: str, rules: tuple[Rule, ...]) -> Iterator[Claim]:
    for name, key, reader in rules:
        source = prefix + key
        value = reader(source, read.get(key))
        if value is not None:
            yield Claim(name, value, source)


def in_object(name: str, path: str, *rules: Rule) -> Dialect:
    """Make a dialect that uses an object of the body exclusively.

    Args:
        name: the dialect's name.
        path: the dotted path of the object in the body.
        rules: the rules for the keys of the object. Their keys may be dotted paths below ``path``.
    """

    def extract(request: Request) -> Iterator[Claim]:
        for rule in rules:
            *parents, key = rule.key.split(".")
            place = ".".join([path, *parents])
            yield from _claims(request.object_at(place), f"{place}.", (rule._replace(key=key),))

    return Dialect(name, extract, (path,))


def in_fields(name: str, path: str, *rules: Rule) -> Dialect:
    """Make a dialect that uses some keys of an object of the body. The path "" means the body itself."""
    prefix = f"{path}." if path else ""
    return Dialect(
        name,
        lambda request: _claims(request.object_at(path), prefix, rules),
        tuple(prefix + rule.key for rule in rules),
    )


def in_headers(name: str, *rules: Rule) -> Dialect:
    """Make a dialect of headers, each of which gives one field."""
    return Dialect(name, lambda request: _claims(request.headers, "", rules))


def agents_in_headers(name: str, *, session: str, agent: str, parent: str) -> Dialect:
    """Make a dialect of headers in which the agents of a session are separate programs.

    Args:
        name: the dialect's name.
        session: the header of the session's id, which is the program of a request without an agent.
        agent: the header of the agent's id, which is the program.
        parent: the header of the parent agent's id. Without it, the session is the agent's parent.
    """

    def extract(request: Request) -> Iterator[Claim]:
        read = ((header, identifier(header, request.headers.get(header))) for header in (agent, parent, session))
        ids = {header: value for header, value in read if value is not None}
        program = agent if agent in ids else session
        if program in ids:
            yield Claim("program_id", ids[program], program)
        owner = parent if parent in ids else session
        if agent in ids and owner in ids:
            yield Claim("parent_id", ids[owner], owner)

    return Dialect(name, extract)


def session_agent(path: str) -> Dialect:
    """Make a dialect for an `agentic_context` without a program_id. The program is then `SESSION` or `SESSION:AGENT`,
    since an agent's id is unique only in its session.
    """

    def extract(request: Request) -> Iterator[Claim]:
        context = request.object_at(path)
        ids = [identifier(f"{path}.{key}", context.get(key)) for key in ("program_id", "session_id", "agent_id")]
        program, session, agent = ids
        source = f"{path}.session_id"
        if program is None and session is not None:
            whole = identifier(source, session if agent is None else f"{session}:{agent}")
            yield Claim("program_id", whole or session, source)

    return Dialect(f"session of {path}", extract)


def _named_tool(request: Request) -> Iterator[Claim]:
    """Yield the tool that `tool_choice` names, if it names one. vLLM validates `tool_choice`."""
    choice = request.body.get("tool_choice")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and (tool := identifier("tool_choice.function.name", name)):
        yield Claim("expected_tool", tool, "tool_choice.function.name")


_AGENTIC_CONTEXT = (
    Rule("program_id", "program_id", identifier),
    Rule("parent_id", "parent_program_id", identifier),
    Rule("last_turn", "expected_resume", no_resume),
    Rule("expected_pause_s", "expected_resume", resume_in),
    Rule("priority", "priority", higher_first),
    Rule("deadline_s", "deadline_seconds", seconds),
    Rule("expected_output_tokens", "expected_output_length", tokens),
    # The next three and `record` are Caesura's extensions. Clients may know their program's later turns.
    Rule("expected_returned_tokens", "expected_returned_length", tokens),
    Rule("expected_later_tokens", "expected_later_length", tokens),
    Rule("expected_later_turns", "expected_later_turns", tokens),
    Rule("retention_s", "kv_retention_ttl_seconds", seconds),
    Rule("record", "record", recording),
)

_AGENT_HINT = (
    Rule("program_id", "session_id", identifier),
    Rule("parent_id", "parent_session_id", identifier),
    Rule("retention_s", "cache_control.ttl", seconds),
)

DIALECTS: tuple[Dialect, ...] = (
    in_object("agentic_context", "vllm_xargs.agentic_context", *_AGENTIC_CONTEXT),
    session_agent("vllm_xargs.agentic_context"),
    in_object("agentic_context at the top", "agentic_context", *_AGENTIC_CONTEXT),
    session_agent("agentic_context"),
    in_object("agent_hint", "agent_hint", *_AGENT_HINT),
    in_object("agent_hint in vllm_xargs", "vllm_xargs.agent_hint", *_AGENT_HINT),
    in_object(
        "Dynamo body",
        "nvext",
        Rule("program_id", "session_control.session_id", identifier),
        Rule("last_turn", "session_control.action", closes),
        Rule("priority", "agent_hints.priority", higher_first),
        Rule("expected_output_tokens", "agent_hints.osl", tokens),
    ),
    in_fields("vLLM body", "", Rule("program_id", "session_id", identifier), Rule("priority", "priority", integer)),
    in_fields("ThunderAgent", "", Rule("program_id", "program_id", identifier)),
    in_fields(
        "Continuum",
        "vllm_xargs",
        Rule("program_id", "job_id", identifier),
        Rule("last_turn", "is_last_step", flag),
        Rule("expected_tool", "this_func_call", identifier),
        Rule("last_tool", "last_func_call", identifier),
    ),
    in_fields("vLLM xargs", "vllm_xargs", Rule("program_id", "session_id", identifier)),
    in_headers(
        "vLLM headers",
        Rule("program_id", "x-session-id", identifier),
        Rule("parent_id", "x-parent-session-id", identifier),
        Rule("priority", "x-vllm-priority", integer),
    ),
    in_headers("program header", Rule("program_id", "x-program-id", identifier)),
    in_headers("recording", Rule("record", "x-record", recording)),
    in_headers(
        "Dynamo headers",
        Rule("program_id", "x-dynamo-session-id", identifier),
        Rule("parent_id", "x-dynamo-parent-session-id", identifier),
        Rule("last_turn", "x-dynamo-session-final", flag),
    ),
    agents_in_headers(
        "x-claude-code",
        session="x-claude-code-session-id",
        agent="x-claude-code-agent-id",
        parent="x-claude-code-parent-agent-id",
    ),
    agents_in_headers("Codex", session="session-id", agent="thread-id", parent="x-codex-parent-thread-id"),
    in_headers("OpenCode", Rule("program_id", "x-session-affinity", identifier)),
    in_headers("AIBrix", Rule("program_id", "x-aibrix-session-key", identifier)),
    Dialect("tool_choice", _named_tool),
)
"""All dialects. For each field, the first dialect that has a value is used."""
