"""The dialects in which agent clients say whose turn a request is: one entry each in ``DIALECTS``, in precedence.

An extractor reads a request and yields claims; it decides nothing and changes nothing. Sources: vLLM RFC 52113
(`agent_hint`) and router issue 285 (`agentic_context`), NVIDIA Dynamo's request extensions and session headers,
Continuum's, AIBrix's and ThunderAgent's clients.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.core.errors import BadRequest
from cluster.core.program import MAX_ID_LENGTH

MAX_NUMBER = 2**31 - 1
"""No hint is larger, in tokens, seconds or steps of priority: the largest integer that every layer below carries."""

Value = str | int | float | bool
Reader = Callable[[str, Any], Value | None]
"""Of a source's name and its raw value: what it says, None for nothing. Raises BadRequest for what cannot be used."""


class Claim(NamedTuple):
    """One source says one thing."""

    field: str
    """Of ProgramIdentity or Hints."""
    value: Value
    source: str
    """Header or dotted path in the body."""


class Rule(NamedTuple):
    """Where a dialect says what."""

    field: str
    key: str
    read: Reader


@dataclass(frozen=True, slots=True)
class Request:
    """What an extractor sees."""

    headers: Mapping[str, str]
    body: Mapping[str, Any]
    _parsed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Objects that came as JSON text, by path: several rules read each, and it may be as long as the body."""

    @classmethod
    def of(cls, headers: Mapping[str, str], body: Mapping[str, Any]) -> "Request":
        """With header names in lower case and hyphens; a name that was spelled so wins over one with underscores."""
        lower = {name.lower(): value for name, value in headers.items()}
        return cls({name.replace("_", "-"): value for name, value in lower.items()} | lower, body)

    def object_at(self, path: str) -> Mapping[str, Any]:
        """The object at a dotted path of the body, "" for the body itself; empty where there is none.

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
            # Stock vLLM takes no nested objects there, so that clients send them as JSON text.
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
    """An id or the name of a tool: printable, at most MAX_ID_LENGTH characters; integers count as their digits."""
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
    """A duration: finite, not negative."""
    number = _number(source, value)
    if number is not None and number < 0:
        raise BadRequest(f"{source} must not be negative", param=source)
    return None if number is None else float(number)


def integer(source: str, value: Any) -> int | None:
    """A whole number."""
    number = _number(source, value)
    if number is not None and number != int(number):
        raise BadRequest(f"{source} must be a whole number", param=source)
    return None if number is None else int(number)


def tokens(source: str, value: Any) -> int | None:
    """A number of tokens: whole, not negative."""
    count = integer(source, value)
    if count is not None and count < 0:
        raise BadRequest(f"{source} must not be negative", param=source)
    return count


def higher_first(source: str, value: Any) -> int | None:
    """A priority of a dialect in which more is sooner, turned round: in Hints, as in vLLM, least is first."""
    priority = integer(source, value)
    return None if priority is None else -priority


def flag(source: str, value: Any) -> bool | None:
    """Yes or no, as JSON, as 0 and 1, or as the words that headers use."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word is None or word == "":
        return None
    for answer, words in ((True, (True, 1, "true", "1")), (False, (False, 0, "false", "0"))):
        if word in words:
            return answer
    raise BadRequest(f"{source} must be true or false", param=source)


def resume_in(source: str, value: Any) -> float | None:
    """`expected_resume` as a number: seconds until the program comes back. true and false say nothing of when."""
    return None if isinstance(value, bool) else seconds(source, value)


def no_resume(source: str, value: Any) -> bool | None:
    """`expected_resume` as true or false: whether the program comes back at all after this turn."""
    return not value if isinstance(value, bool) else None


def closes(source: str, value: Any) -> bool | None:
    """A session's action: `close` ends it after this turn; open and bind say nothing that we do not know."""
    action = identifier(source, value)
    return True if action == "close" else None


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
    if not -MAX_NUMBER <= number <= MAX_NUMBER:  # also of NaN, which compares with nothing
        raise BadRequest(f"{source} must be a number within {MAX_NUMBER}", param=source)
    return number


Extractor = Callable[[Request], Iterator[Claim]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to say whose turn it is."""

    name: str
    extract: Extractor
    consumes: tuple[str, ...] = ()
    """Dotted paths of the body that are for us alone and would be refused or misread by vLLM."""


def _claims(read: Mapping[str, Any], prefix: str, rules: tuple[Rule, ...]) -> Iterator[Claim]:
    for name, key, reader in rules:
        source = prefix + key
        value = reader(source, read.get(key))
        if value is not None:
            yield Claim(name, value, source)


def in_object(name: str, path: str, *rules: Rule) -> Dialect:
    """A dialect that has an object of the body to itself."""

    def extract(request: Request) -> Iterator[Claim]:
        for rule in rules:
            *parents, key = rule.key.split(".")
            place = ".".join([path, *parents])
            yield from _claims(request.object_at(place), f"{place}.", (rule._replace(key=key),))

    return Dialect(name, extract, (path,))


def in_fields(name: str, path: str, *rules: Rule) -> Dialect:
    """A dialect that has some keys of an object of the body, "" for the body itself."""
    prefix = f"{path}." if path else ""
    return Dialect(
        name,
        lambda request: _claims(request.object_at(path), prefix, rules),
        tuple(prefix + rule.key for rule in rules),
    )


def in_headers(name: str, *rules: Rule) -> Dialect:
    """A dialect of headers, each with one meaning."""
    return Dialect(name, lambda request: _claims(request.headers, "", rules))


def agents_in_headers(name: str, *, session: str, agent: str, parent: str) -> Dialect:
    """A dialect of headers in which agents share a session: each agent is a program, the session that of the first."""

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
    """`agentic_context` without a program_id: the session, and within it the agent, whose id is unique only there."""

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
    """A turn whose request names the tool to call. Anything else in `tool_choice` is vLLM's to judge."""
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
    # Ours, in the manner of the others: what only a client that knows its program can say.
    Rule("expected_returned_tokens", "expected_returned_length", tokens),
    Rule("expected_later_tokens", "expected_later_length", tokens),
    Rule("expected_later_turns", "expected_later_turns", tokens),
    Rule("retention_s", "kv_retention_ttl_seconds", seconds),
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
"""The table: what stands earlier wins, field by field."""
