"""Finds the tools that an assistant's text calls. Their names are the keys of all tool statistics.

The key of a tool call is the tool's name. If the call runs a shell command, the command is added (``bash:grep``). For a
reply with fenced bash blocks, the key is the first word of each sub-command (Continuum, appendix A). The module runs in
the engine's process at the end of a turn. It accepts any text, and every pattern needs time linear in the text.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from cluster.core.program import CLASS_MARK

MAX_NAMES = 32
MAX_NAME_LENGTH = 64
COMMAND_ARGUMENTS = ("command", "cmd")
"""Names of arguments that contain a shell command, in the tools of common agents."""


def tool_names(text: str) -> tuple[str, ...]:
    """Return the tools that ``text`` calls, in the first format in which it calls one; ``()``: it calls none.

    It never raises.
    """
    for names in (_tagged, _functions, _mistral, _harmony, _bare_json, _pythonic, _bash_blocks):
        if found := bounded(names(text)):
            return found
    return ()


def bounded(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first MAX_NAMES names, cut to MAX_NAME_LENGTH characters, without characters that are not
    printable.
    """
    printable = ("".join(filter(str.isprintable, name[:MAX_NAME_LENGTH])).strip() for name in names)
    return tuple(islice(filter(None, printable), MAX_NAMES))


# --- JSON formats ---

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s++")
_LEAD = re.compile(r"(?:\s|<\|[a-z_]{1,32}\|>)++")
"""Text that may precede a bare call: white space and special tokens such as Llama's <|python_tag|>."""
_SEPARATOR = re.compile(r"\s*+;")
_MISTRAL_NAME = re.compile(r"\s*+([\w.-]++)(?:\[ARGS\]|(?=\s*+\{))")


def _after(pattern: re.Pattern[str], text: str, position: int = 0) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _json_at(text: str, position: int) -> tuple[Any, int] | None:
    """Return the JSON object or array at ``position``, after white space, and its end; None: there is no complete
    one.
    """
    start = _after(_SPACE, text, position)
    if not text.startswith(("{", "["), start):
        return None
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _called(calls: Any) -> Iterator[str]:
    """Yield the tools of a JSON call, or of a list of calls."""
    for call in calls if isinstance(calls, list) else [calls]:
        # An answer in plain JSON may have a key `name` too.
        if isinstance(call, dict) and isinstance(call.get("name"), str) and call.keys() & {"arguments", "parameters"}:
            yield classed(call["name"], call.get("arguments", call.get("parameters")))


def classed(name: str, arguments: Any) -> str:
    """Return the tool's name, with the first word of its shell command if the arguments have one."""
    if isinstance(arguments, str):
        arguments = (_json_at(arguments, 0) or (None,))[0]
    if not isinstance(arguments, dict):
        return name
    command = next((arguments[key] for key in COMMAND_ARGUMENTS if key in arguments), None)
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        # In ["bash", "-lc", "grep ..."], the command is the last word.
        command = command[-1] if len(command) > 2 and command[1].startswith("-") else command[0]
    word = next(_first_words(command), None) if isinstance(command, str) else None
    return f"{name}{CLASS_MARK}{word}" if word else name


def _tagged(text: str) -> Iterator[str]:
    """Hermes: <tool_call>{"name": ..., "arguments": ...}</tool_call>. The end of the last call may be missing."""
    return _marked(text, "<tool_call>", None)


def _mistral(text: str) -> Iterator[str]:
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": ...}], or in later versions [TOOL_CALLS]name{...} or
    name[ARGS]{...}.
    """
    return _marked(text, "[TOOL_CALLS]", _MISTRAL_NAME)


def _marked(text: str, mark: str, bare_name: re.Pattern[str] | None) -> Iterator[str]:
    """Yield the tools of JSON calls, or of names with JSON arguments, after each ``mark`` outside of arguments."""
    position = 0
    for _ in range(MAX_NAMES):
        position = text.find(mark, position)
        if position < 0:
            return
        position += len(mark)
        named = bare_name.match(text, position) if bare_name else None
        if named:
            yield named[1]
            position = named.end()
        if parsed := _json_at(text, position):
            calls, position = parsed
            if not named:
                yield from _called(calls)


def _bare_json(text: str) -> Iterator[str]:
    """Output that begins with calls: objects separated by semicolons (Llama 3), or a list (tool_choice: required)."""
    parsed = _json_at(text, _after(_LEAD, text))
    while parsed:
        calls, end = parsed
        yield from _called(calls)
        separator = _SEPARATOR.match(text, end)
        parsed = _json_at(text, separator.end()) if separator else None


# --- other marks ---

_FUNCTION = re.compile(r"<function=([^<>\s]++)>(?:(?!</function>).)*+", re.DOTALL)
_HARMONY_NAME = re.compile(r"(?<![^\s>])to=functions\.([\w.-]++)")


def _functions(text: str) -> Iterator[str]:
    """<function=name>...</function>: Llama 3 with JSON inside, or Qwen coder with XML inside."""
    return (match[1] for match in _FUNCTION.finditer(text))


def _harmony(text: str) -> list[str]:
    """gpt-oss: the recipient in the header of a message, to=functions.name."""
    return _HARMONY_NAME.findall(text) if "<|channel|>" in text else []


_PYTHON_START = re.compile(r"\[\s*+[A-Za-z_][\w.]*+\(")
_PYTHON_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.?)*+(?:'|\Z)       # a string; one that does not close takes the rest
      | "(?:[^"\\]|\\.?)*+(?:"|\Z)
      | (?<![\w.])(?P<call>[A-Za-z_][\w.]*+)\(
      | [\[({] | [\])}]""",
    re.DOTALL | re.VERBOSE,
)
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def _pythonic(text: str) -> list[str]:
    """Output that begins with a list of calls, [f(a=1), g()].

    The text is scanned, not parsed, since some texts make Python's own parser overflow the C stack, which would end the
    engine.
    """
    start = _after(_LEAD, text)
    if not _PYTHON_START.match(text, start):
        return []
    names: list[str] = []
    depth = 0
    for token in _PYTHON_TOKEN.finditer(text, start):
        if token["call"] and depth == 1:
            names.append(token["call"])
        depth += _DEPTH.get(token[0][-1], 0)
        if depth == 0:
            return names
    return []


# --- shell commands ---

_BASH_BLOCK = re.compile(r"^[ \t]*+```(?:bash|sh)[^\S\n]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
_SHELL_TOKEN = re.compile(
    r"""(?P<operator>&&|\|\|)
      | (?<!\S)\#[^\n]*+  # a comment
      | (?P<word>(?:[^\s'"\\&|;()] | \\[^\n] | '[^']*+' | "(?:[^"\\]|\\.)*+"
          | ['"])++)  # a quote that does not close is a character like others""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*+=")
_QUOTES = re.compile(r"['\"\\]")


def _bash_blocks(text: str) -> Iterator[str]:
    """Yield the first word of each sub-command in the fenced ``bash`` and ``sh`` blocks.

    Sub-commands are separated by && and ||. As in the paper, text after a pipe, a semicolon or the end of a line is not
    a sub-command. Of a path, the last part is used.
    """
    for block in _BASH_BLOCK.finditer(text):
        yield from _first_words(block[1])


def _first_words(command: str) -> Iterator[str]:
    first = True
    for token in _SHELL_TOKEN.finditer(command):
        if token["operator"]:
            first = True
        elif first and token["word"] and not _ASSIGNMENT.match(token["word"]):
            first = False
            word = _QUOTES.sub("", token["word"])
            yield word.rstrip("/").rpartition("/")[2] or word
