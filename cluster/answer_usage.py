"""What the end of an answer says of it: the tokens that it used, and whether it is an error."""

import re
from typing import NamedTuple

USAGE_BYTES = 4096
"""Of the end of an answer, in which its usage is looked for."""
_USAGE = re.compile(rb'"(prompt|completion)_tokens":\s*(\d{1,9})')
_ERROR = b'data: {"error"'


class Usage(NamedTuple):
    """Tokens; None: it does not say."""

    prompt: int | None
    completion: int | None


def usage_of(answer: bytes) -> Usage:
    """Of an answer that is no stream."""
    used = {name: int(number) for name, number in _USAGE.findall(answer[-USAGE_BYTES:])}
    return Usage(used.get(b"prompt"), used.get(b"completion"))


def tells_error(events: bytes) -> bool:
    """Whether one of a stream's events is an error."""
    return _ERROR in events
