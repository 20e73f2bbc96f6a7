"""A batch, its progress, and the events in its log.

The head of a log has the batch and its progress, so that nobody reads the log to show them. The log has the results of
the lines, from which the ingress that takes a batch over knows which lines are left.
"""

from typing import Literal

import msgspec

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
"""The routes that a batch can call."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

Pause = Literal["store_full", "storage_quota"]
"""Why no line is started now: Redis has no memory for results, or the tenant's files take all that it may have."""

BATCH_LABEL, INPUT_LABEL = "batch", "input"
"""Labels of a batch's log: the batch as JSON, and the id of its input file."""


class Batch(msgspec.Struct, frozen=True):
    """What the client has asked for."""

    id: str
    tenant: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    created_s: float
    expires_s: float
    """Unix times in seconds."""
    metadata: dict[str, str] | None = None
    output_kept_s: float | None = None
    """Seconds for which the output is kept; None: as long as any file."""


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with the input file."""

    code: str
    message: str
    line: int | None = None
    """Number of the line, from 1; None: the file itself is wrong."""
    param: str | None = None


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a batch is. Times are Unix times in seconds; None: not yet, or never."""

    status: Status = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    """Numbers of lines: all, those with an answer, and those with an error."""
    paused: Pause | None = None
    began_s: float | None = None
    cancelling_s: float | None = None
    finalizing_s: float | None = None
    ended_s: float | None = None
    closing: Status | None = None
    """The status with which a batch ends whose lines are not worked on any more; None: they are."""
    attempts: int = 0
    """How often an ingress has begun to work on it."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The first entry of a log."""

    batch: Batch


class Marked(msgspec.Struct, frozen=True, tag=True):
    """The progress in the head of the log has changed, and nothing else."""


class Line(msgspec.Struct, frozen=True, tag=True):
    """The result of a line."""

    number: int
    """From 1."""
    ok: bool
    """Whether it is a line of the output file; else it is one of the error file."""
    text: bytes
    """The line with a newline, packed by `cluster.batches.content`."""
    size: int
    """Its size in bytes before it was packed."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The last entry of a log."""

    status: Status


BatchEvent = Accepted | Marked | Line | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[BatchEvent] = msgspec.msgpack.Decoder(BatchEvent)
_progress: msgspec.json.Decoder[Progress] = msgspec.json.Decoder(Progress)
_batch: msgspec.json.Decoder[Batch] = msgspec.json.Decoder(Batch)


def encode(event: BatchEvent) -> bytes:
    """Encode an entry for the log."""
    return _encoder.encode(event)


def decode(entry: bytes) -> BatchEvent:
    """Decode an entry of the log.

    Raises:
        ValueError: ``entry`` is not a result of `encode`.
    """
    return _decoder.decode(entry)


def to_text(record: Batch | Progress) -> str:
    """Return a batch or its progress as a text for the head of the log."""
    return msgspec.json.encode(record).decode()


def batch_of(text: str) -> Batch:
    """Return what `to_text` made a text of.

    Raises:
        ValueError: it is no such text.
    """
    return _batch.decode(text)


def progress_of(text: str) -> Progress:
    """Return what `to_text` made a text of.

    Raises:
        ValueError: it is no such text.
    """
    return _progress.decode(text)
