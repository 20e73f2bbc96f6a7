"""The parts of a message in chat completions: which kinds are read, and files, whose text becomes a part.

vLLM would fetch videos and audio from any URL, and by a `uuid` alone it would take an image that another client has
sent from its cache. Neither reaches it.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.core.errors import BadRequest

READ = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference", "image_url", "input_image")
)
"""The types of parts that a model may read."""

_DATA = re.compile(r"^data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[\w.-]+)*;base64,", re.IGNORECASE)
_MEDIA = ("audio/", "image/", "video/")
_PDF = b"%PDF-"
MAX_NAME_LENGTH = 256


class FileRefused(ValueError):
    """A file that cannot be read."""


def file_text(data: str, name: str | None) -> str:
    """Return what the model reads of a file: its name, and its text.

    Args:
        data: the file as a `data:` URL, or in base64 alone.
        name: its name; None: it has none.

    Raises:
        FileRefused: the data is not base64, or the file is no text in UTF-8.
    """
    head = _DATA.match(data)
    if head is None and data[:5].lower() == "data:":
        raise FileRefused("must be `data:TYPE;base64,...`")
    try:
        content = base64.b64decode(data[head.end() if head else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise FileRefused(f"its data is not base64: {error}") from None
    kind = ((head["type"] if head else None) or "unknown").lower()
    if content.startswith(_PDF) or kind == "application/pdf":
        raise FileRefused("a PDF is not read here; send its text, or images of its pages")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or kind.startswith(_MEDIA):
        raise FileRefused(f"a file of the type {kind[:100]!r} is not read here, only text in UTF-8")
    return f"[file {name[:MAX_NAME_LENGTH]}]\n{text}" if name else text


def with_file_texts(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat body in which each `file` part is the text of the file. A body without files is not copied.

    Raises:
        BadRequest: a file cannot be read. ``param`` is its place.
    """
    if not any(part.get("type") == "file" for _, part in _parts(body)):
        return body
    messages = [
        {**message, "content": [_read(part, f"{path}.{number}") for number, part in enumerate(message["content"])]}
        if _has_parts(message)
        else message
        for path, message in ((f"messages.{place}.content", one) for place, one in enumerate(body["messages"]))
    ]
    return {**body, "messages": messages}


def check_parts(body: Mapping[str, Any]) -> None:
    """Check that the parts of a chat body's messages are of kinds that a model may read.

    Raises:
        BadRequest: one is not. ``param`` is its place.
    """
    for path, part in _parts(body):
        if part.get("uuid") is not None:
            raise _bad(f"{path}.uuid", "images are not shared by an id; leave it out")
        kind = part.get("type")
        is_read = isinstance(kind, str) and kind in READ
        if not is_read and (kind is not None or "image_url" not in part):
            known = ", ".join(sorted(READ))
            raise _bad(path, f"parts of the type {str(kind)[:64]!r} are not read here; the types are: {known}")


def _parts(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    messages = body.get("messages")
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if _has_parts(message):
            for number, part in enumerate(message["content"]):
                if isinstance(part, Mapping):
                    yield f"messages.{place}.content.{number}", part


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _read(part: Any, path: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "file":
        return part
    file = part.get("file")
    data, name = (file.get("file_data"), file.get("filename")) if isinstance(file, Mapping) else (None, None)
    if not isinstance(data, str):
        raise _bad(f"{path}.file", "send the file as `file_data`; uploaded files are not read in messages")
    try:
        return {"type": "text", "text": file_text(data, name if isinstance(name, str) else None)}
    except FileRefused as error:
        raise _bad(f"{path}.file.file_data", str(error)) from None


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param, code="unsupported_content")
