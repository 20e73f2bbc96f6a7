"""The lines of a batch's input file: their form, and what is wrong with them. Pure functions.

The body of a line is not parsed here. The route that the line names does it, within the limits of any request.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from cluster.batches.records import LineError

MAX_LINES = 50_000
"""Largest number of lines of a batch, which is OpenAI's."""
MAX_ERRORS = 20
"""Largest number of wrong lines that are listed."""
MAX_CUSTOM_ID_LENGTH = 512


class LineRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line, parsed."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decoder: msgspec.json.Decoder[LineRequest] = msgspec.json.Decoder(LineRequest)


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of an input file."""

    number: int
    """From 1, as an editor counts."""
    text: bytes

    @property
    def request(self) -> LineRequest:
        """The parsed line, which `Validation` has accepted."""
        return _decoder.decode(self.text)


class Wrong(ValueError):
    """A line has a mistake."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def numbered(pieces: Iterable[bytes]) -> Iterator[InputLine]:
    """Yield the lines of a file, without those that are empty. Each piece ends with a line."""
    number = 0
    for piece in pieces:
        for text in piece.removesuffix(b"\n").split(b"\n"):
            number += 1
            if stripped := text.strip():
                yield InputLine(number, stripped)


class Validation:
    """Checks the lines of a file one after another.

    Args:
        endpoint: the route of the batch, which each line must name.
    """

    def __init__(self, endpoint: str) -> None:
        self.errors: list[LineError] = []
        """At most `MAX_ERRORS`."""
        self.lines = 0
        self._endpoint = endpoint
        self._ids: set[bytes] = set()

    def check(self, line: InputLine) -> None:
        """Check the next line."""
        self.lines += 1
        if self.lines > MAX_LINES or len(self.errors) >= MAX_ERRORS:
            return
        try:
            self._check(line)
        except Wrong as error:
            self.errors.append(LineError(error.code, str(error), line.number, error.param))

    def result(self) -> tuple[LineError, ...]:
        """Return what is wrong with the file, after its last line."""
        if self.lines > MAX_LINES:
            message = f"the file has {self.lines} lines; a batch has at most {MAX_LINES}"
            return (LineError("too_many_tasks", message),)
        if not self.lines:
            return (LineError("empty_file", "the file has no lines"),)
        return tuple(self.errors)

    def _check(self, line: InputLine) -> None:
        request = _parsed(line.text)
        if not 1 <= len(request.custom_id) <= MAX_CUSTOM_ID_LENGTH:
            message = f"custom_id: must be a text of 1 to {MAX_CUSTOM_ID_LENGTH} characters"
            raise Wrong("invalid_custom_id", message, "custom_id")
        if request.method != "POST":
            raise Wrong("invalid_method", "method: must be POST", "method")
        if request.url != self._endpoint:
            raise Wrong("mismatched_url", f"url: must be {self._endpoint}, the endpoint of the batch", "url")
        if not bytes(request.body).startswith(b"{"):
            raise Wrong("invalid_body", "body: must be an object", "body")
        custom_id = request.custom_id
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            raise Wrong("duplicate_custom_id", f"custom_id: {custom_id[:64]!r} is there twice", "custom_id")
        self._ids.add(digest)


def _parsed(text: bytes) -> LineRequest:
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError as error:
        field = re.search("`(?:\\$\\.)?([^`]+)`$", str(error))
        code = "missing_required_parameter" if "missing required field" in str(error) else "invalid_request_line"
        raise Wrong(code, str(error), None if field is None else field[1][:64]) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Wrong("invalid_json_line", f"the line is not valid JSON: {error}") from error
