"""The process in which a synchronous Python tool runs: `python -m tools_runtime.python_worker ENTRY`.

It answers one call at a time over its stdin and stdout, so that killing the process ends a call. A call is a length and
as many bytes of JSON, `{"arguments": {...}, "cap_bytes": n}`. An answer is a status, a length and text. Parts of it
come before, each in the same form.
"""

import importlib
import inspect
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

CALL = struct.Struct(">I")
ANSWER = struct.Struct(">BI")

OK, CUT, FAILED, BROKEN, PART = range(5)
"""Status of a message: the answer is complete, it is cut at the cap, the tool raised an exception, there is no such
function, or the text is a part of the answer."""


def load(entry: str) -> Callable[..., Any]:
    """Import the function ``module:function``.

    Raises:
        ImportError, AttributeError: there is no such module or function.
        Exception: what its module raises.
    """
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def as_text(value: Any) -> str:
    """Return the result of a Python tool as text: a str unchanged, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    return json.dumps(value, ensure_ascii=False, default=str)


def told(error: BaseException) -> str:
    """Return an exception as one line for the model."""
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Answer calls until stdin ends."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The tool's own prints must not become answers, and it must not read calls.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        function = load(sys.argv[1])
    except BaseException as error:
        _answer(answers, BROKEN, told(error))
        raise
    while header := calls.read(CALL.size):
        call = json.loads(calls.read(CALL.unpack(header)[0]))
        for status, text in _called(function, call["arguments"], call["cap_bytes"]):
            _answer(answers, status, text)


def pieces_of(value: Any) -> Iterator[str]:
    """Yield the answer of a function in pieces of text: those of a generator, or all at once."""
    return map(as_text, value if inspect.isgenerator(value) else (value,))


def _called(function: Callable[..., Any], arguments: Mapping[str, Any], cap_bytes: int) -> Iterator[tuple[int, str]]:
    room = cap_bytes
    try:
        for text in pieces_of(function(**arguments)):
            if len(text) > room:
                yield CUT, text[:room]
                return
            room -= len(text)
            yield PART, text
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool's own code may raise anything
        yield FAILED, told(error)[:cap_bytes]
    else:
        yield OK, ""


def _answer(answers: BinaryIO, status: int, text: str) -> None:
    encoded = text.encode(errors="replace")
    answers.write(ANSWER.pack(status, len(encoded)) + encoded)
    answers.flush()


if __name__ == "__main__":
    main()
