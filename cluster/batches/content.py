"""The content of files of JSON lines: pieces that end at a line's end, compressed."""

import zlib
from collections.abc import Callable, Iterable, Iterator

from cluster.core.errors import BadRequest

PIECE_BYTES = 256 << 10
"""Size from which on a piece ends with its line."""
LEVEL = 6
"""Level of zlib: JSON lines shrink to a fifth, at 30 MB a second."""


def pieces_of(read: Callable[[int], bytes], max_line_bytes: int) -> Iterator[bytes]:
    """Yield the content of a file in pieces of about `PIECE_BYTES`, each of which ends with a line.

    Args:
        read: returns at most so many of the next bytes, and none at the end.
        max_line_bytes: largest size of a line.

    Raises:
        BadRequest: a line is longer.
    """
    rest = b""
    while chunk := read(PIECE_BYTES):
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if len(rest) - end > max_line_bytes or (end and _longest(rest[:end]) > max_line_bytes):
            raise BadRequest(f"file: a line is longer than {max_line_bytes} bytes", param="file", code="line_too_large")
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines, each of which ends with a newline, in pieces of about `PIECE_BYTES`."""
    parts: list[bytes] = []
    size = 0
    for line in lines:
        parts.append(line)
        size += len(line)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def packed(piece: bytes) -> bytes:
    """Return a piece as the store has it, in zlib's format. `unpacked` reads it."""
    return zlib.compress(piece, LEVEL)


def unpacked(piece: bytes) -> bytes:
    """Return what `packed` compressed.

    Raises:
        ValueError: the piece is damaged.
    """
    try:
        return zlib.decompress(piece)
    except zlib.error as error:
        raise ValueError(f"a piece of a file is damaged: {error}") from error


def _longest(text: bytes) -> int:
    return max(map(len, text.split(b"\n")))
