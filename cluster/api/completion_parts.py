"""Reads the texts and token ids of a completion's first choice, from the pieces of its answer."""

from collections.abc import Iterator

import msgspec

_EVENT = b"data: {"


class CompletionPart(msgspec.Struct):
    """A part of a choice. Other fields of it are not read."""

    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[CompletionPart] = []


_decode = msgspec.json.Decoder(_Completion).decode


def completion_parts(piece: bytes) -> Iterator[CompletionPart]:
    """Yield the parts of the first choice in a piece: JSON, or one or more events of a stream.

    What is not a completion yields nothing.
    """
    bodies = [piece]
    if not piece.startswith(b"{"):
        bodies = [event[len(_EVENT) - 1 :] for event in piece.split(b"\n\n") if event.startswith(_EVENT)]
    for body in bodies:
        try:
            completion = _decode(body)
        except msgspec.MsgspecError:
            return
        yield from (part for part in completion.choices if part.index == 0)
