"""The protocol of a turn between an ingress and a replica: one `TurnCall`, and frames for the answer.

The answer is a sequence of frames: a length (four bytes, big-endian) and a msgpack payload. A frame of a stream has the
final bytes for the client beside the progress that they add, so that the ingress forwards the bytes without reading
them, and can let another replica continue.
"""

import json
from struct import Struct
from typing import Any

import msgspec

from cluster.core import errors
from cluster.core.errors import HttpError
from cluster.core.stream import Progress, StreamChunk
from cluster.core.turn import Continuation, TurnBegan, TurnDelta, TurnDone

TURN_PATH = "/turn"
"""Path of a replica's turn server (`POST`)."""

TURN = "turn"
"""Method of a turn of a program that the cluster runs. Its answer is pieces, not events."""

Answer = StreamChunk[Any] | bytes | HttpError
"""A piece of an answer: a piece of a stream, a whole answer, or an error."""

_LENGTH = Struct(">I")


class TurnCall(msgspec.Struct, frozen=True):
    """A turn, as an ingress sends it to a replica."""

    method: str
    """``chat``, ``completions`` or `TURN`."""
    body: dict[str, Any]
    """The JSON body, without the fields of the program's identity."""
    headers: dict[str, str]
    """Headers that vLLM may see. ``x-request-id`` becomes part of the answer's id."""
    key: str | None = None
    """The program's key. None: the request belongs to no program."""
    identity: str | None = None
    """The program's identity, as `ProgramIdentity.encode` made it. None for a request that is not a turn."""
    epoch: int | None = None
    """Epoch of the program's placement. A turn of an earlier epoch is rejected as ProgramMoved. None: it is never
    rejected."""
    so_far: Progress | None = None
    """Progress of this answer on another replica. None: it begins here."""
    continuation: Continuation | None = None
    """The token ids from which a turn of a run continues. None: its prompt is rendered from the messages."""
    answers: tuple[int, ...] | None = None
    """Places of the messages that may be shortened if the prompt does not fit: answers of the cluster's tools. None: it
    is no turn of a run, and its bound of output is its client's own, unless that is as large as the window."""
    record: bool = False
    """Whether the last piece's progress has the tokens of the whole turn."""


class _Head(msgspec.Struct, array_like=True):
    """A TurnCall without its body, which is JSON because msgpack has no integers above 64 bits."""

    body: bytes
    method: str
    headers: dict[str, str]
    key: str | None
    identity: str | None
    epoch: int | None
    so_far: Progress | None
    continuation: Continuation | None
    answers: tuple[int, ...] | None = None
    record: bool = False


class _Events(msgspec.Struct, array_like=True, tag=0):
    progress: Progress
    data: bytes


class _Pieces(msgspec.Struct, array_like=True, tag=1):
    progress: Progress
    pieces: tuple[TurnBegan | TurnDelta | TurnDone, ...]


class _Whole(msgspec.Struct, array_like=True, tag=2):
    data: bytes


class _Failure(msgspec.Struct, array_like=True, tag=3):
    kind: str
    attributes: dict[str, Any]


_KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HttpError)}

_encoder = msgspec.msgpack.Encoder()
_heads = msgspec.msgpack.Decoder(_Head)
_payloads = msgspec.msgpack.Decoder(_Events | _Pieces | _Whole | _Failure)


def encode_call(call: TurnCall) -> bytes:
    """Encode a call as the body of its HTTP request."""
    body = json.dumps(call.body, separators=(",", ":")).encode()
    so_far, continuation = call.so_far, call.continuation
    return _encoder.encode(
        _Head(
            body,
            call.method,
            call.headers,
            call.key,
            call.identity,
            call.epoch,
            so_far,
            continuation,
            call.answers,
            call.record,
        )
    )


def decode_call(data: bytes) -> TurnCall:
    """Decode what :func:`encode_call` encoded.

    Raises:
        ValueError: ``data`` is not a result of :func:`encode_call`.
    """
    head = _heads.decode(data)
    return TurnCall(
        head.method,
        json.loads(head.body),
        head.headers,
        head.key,
        head.identity,
        head.epoch,
        head.so_far,
        head.continuation,
        head.answers,
        head.record,
    )


def encode_frame(answer: Answer) -> bytes:
    """Encode a piece of an answer as a frame."""
    payload: _Events | _Pieces | _Whole | _Failure
    match answer:
        case StreamChunk(progress, bytes(data)):
            payload = _Events(progress, data)
        case StreamChunk(progress, pieces):
            payload = _Pieces(progress, pieces)
        case HttpError():
            attributes = {name: value for name, value in vars(answer).items() if value is not None}
            payload = _Failure(type(answer).__name__, attributes)
        case _:
            payload = _Whole(answer)
    data = _encoder.encode(payload)
    return _LENGTH.pack(len(data)) + data


class FrameDecoder:
    """Decodes the frames of one answer."""

    def __init__(self) -> None:
        self._rest: bytes | bytearray = b""

    @property
    def between_frames(self) -> bool:
        """Whether all bytes so far have been decoded."""
        return not self._rest

    def feed(self, data: bytes) -> list[Answer]:
        """Return the pieces that are complete with ``data``.

        Raises:
            ValueError: a frame is none of ours.
        """
        rest: bytes | bytearray = data
        if self._rest:
            rest = self._rest
            rest += data
        answers = []
        at, size = 0, len(rest)
        with memoryview(rest) as view:
            while size - at >= _LENGTH.size:
                end = at + _LENGTH.size + _LENGTH.unpack_from(view, at)[0]
                if end > size:
                    break
                answers.append(_answer(view[at + _LENGTH.size : end]))
                at = end
        if at or rest is data:  # else a large frame is still growing, and is not copied
            rest = bytearray(rest[at:])
        self._rest = rest
        return answers


def _answer(payload: memoryview) -> Answer:
    match _payloads.decode(payload):
        case _Events(progress, data):
            return StreamChunk(progress, data)
        case _Pieces(progress, pieces):
            return StreamChunk(progress, pieces)
        case _Whole(data):
            return data
        case _Failure(kind, attributes):
            error = _KINDS.get(kind, HttpError)(attributes["message"])
            vars(error).update(attributes)
            return error
    raise AssertionError("the decoder makes no other payload")
