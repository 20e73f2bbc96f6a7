"""The features of the model `tabular`: a context as a vector of float32.

For any context, all numbers are finite and small. Names and words are hashed by CRC-32, which is the same in every
process.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from predictor_service.model import HISTORY, PauseContext, TurnContext

FEATURES_VERSION = 2
"""A bundle that was trained on other features cannot be used. Raise it with every change below."""

Vectors = NDArray[np.float32]

CLASS_MARK = ":"
"""Separator between a tool and the class of its arguments, as in keys of tool statistics."""
LAST_TOOLS = 3
SOURCE_BUCKETS, TOOL_BUCKETS, KEY_BUCKETS = 16, 24, 48
TURN_WORD_BUCKETS, ARGUMENT_WORD_BUCKETS = 256, 256
READ = 4096
"""Characters at the end of a prompt that the features are of."""
HEAD, TAIL = 384, 640
"""Characters at the beginning and at the end of a text whose words become features."""
MOST_WORDS = 192
LARGEST = 30.0
"""Upper bound of every feature."""

_WORD = re.compile(rb"[A-Za-z_]{2,24}|[0-9]+|[^\sA-Za-z_0-9]")
_CUES = (
    b"rror",
    b"Traceback",
    b"```",
    b"FAILED",
    b"passed",
    b"diff --git",
    b"<returncode>0",
    b"warning",
    b"?",
    b"CUDA",
)
_HISTORY_NUMBERS = 2 * 4 + 4
_TURN_NUMBERS = 5 + 3 * _HISTORY_NUMBERS + 4 + len(_CUES)
_PAUSE_NUMBERS = 6 + len(_CUES)

_TURN_ONLY = _TURN_NUMBERS + SOURCE_BUCKETS + LAST_TOOLS * (TOOL_BUCKETS + KEY_BUCKETS)
TURN_FEATURES = _TURN_ONLY + TURN_WORD_BUCKETS
"""Length of a turn's vector."""
PAUSE_FEATURES = _TURN_ONLY + _PAUSE_NUMBERS + TOOL_BUCKETS + 2 * KEY_BUCKETS + ARGUMENT_WORD_BUCKETS
"""Length of a pause's vector: its turn's features without the words of the prompt, and its own features."""
_KEPT_TURNS = 256


def turn_features(turns: Sequence[TurnContext]) -> Vectors:
    """Return the features of turns, shape [turns, TURN_FEATURES]."""
    return _stacked([_turn_row(turn) for turn in turns], TURN_FEATURES)


def pause_features(pauses: Sequence[PauseContext]) -> Vectors:
    """Return the features of pauses, shape [pauses, PAUSE_FEATURES]."""
    return _stacked([_pause_row(pause) for pause in pauses], PAUSE_FEATURES)


def _stacked(rows: Sequence[Vectors], length: int) -> Vectors:
    return np.stack(rows) if rows else np.zeros((0, length), dtype=np.float32)


@lru_cache(maxsize=_KEPT_TURNS)
def _turn_row(turn: TurnContext) -> Vectors:
    """Return a turn's features, which are read-only. They are cached for the pauses that may follow the turn."""
    row = np.zeros(TURN_FEATURES, dtype=np.float32)
    read = turn.text[-READ:]
    text = _ends(read)
    position = _finite(turn.position)
    numbers = [
        _log(position),
        min(position, 100.0) / 25.0,
        _log(turn.prompt_tokens),
        _log(turn.new_tokens),
        1.0 if position == 0 else 0.0,
        *_history(turn.outputs, _log),
        *_history(turn.returned, _log),
        *_history(turn.durations_s, _log_s),
        _log(len(read)),
        _log(read.count("\n")),
        _log(len(turn.offered)),
        _log(len(set(turn.tools[:HISTORY]))),
        *_cues(text),
    ]
    row[:_TURN_NUMBERS] = numbers
    start = _TURN_NUMBERS
    row[start + _bucket(turn.source, SOURCE_BUCKETS)] = 1.0
    start += SOURCE_BUCKETS
    for key in turn.tools[:LAST_TOOLS]:
        row[start + _bucket(key.partition(CLASS_MARK)[0], TOOL_BUCKETS)] = 1.0
        row[start + TOOL_BUCKETS + _bucket(key, KEY_BUCKETS)] = 1.0
        start += TOOL_BUCKETS + KEY_BUCKETS
    _write_words(row[_TURN_ONLY:], text)
    return row


def _pause_row(pause: PauseContext) -> Vectors:
    row = np.zeros(PAUSE_FEATURES, dtype=np.float32)
    row[:_TURN_ONLY] = _turn_row(pause.turn)[:_TURN_ONLY]
    text = _ends(pause.arguments)
    same = [i for i, key in enumerate(pause.turn.tools[:HISTORY]) if key == pause.tool]
    before = [pause.turn.durations_s[i] for i in same if i < len(pause.turn.durations_s)]
    last = next((seconds for seconds in before if seconds is not None), None)
    numbers = [
        _log(pause.output_tokens),
        _log(len(pause.arguments)),
        _log(pause.arguments.count("\n")),
        _log(len(same)),
        0.0 if last is None else 1.0,
        0.0 if last is None else _log_s(last),
        *_cues(text),
    ]
    start = _TURN_ONLY + _PAUSE_NUMBERS
    row[_TURN_ONLY:start] = numbers
    row[start + _bucket(pause.tool.partition(CLASS_MARK)[0], TOOL_BUCKETS)] = 1.0
    start += TOOL_BUCKETS
    row[start + _bucket(pause.tool, KEY_BUCKETS)] = 1.0
    # A second hash: two keys that collide in one table seldom collide in the other.
    row[start + KEY_BUCKETS + _bucket(pause.tool[::-1], KEY_BUCKETS)] = 1.0
    start += 2 * KEY_BUCKETS
    _write_words(row[start:], text)
    return row


def _history(values: Sequence[float | None], scale: Callable[[float], float]) -> list[float]:
    """Return the last four values, whether each is known, and the mean, maximum, deviation and count of all."""
    scaled = [None if value is None else scale(value) for value in values[:HISTORY]]
    known = [value for value in scaled if value is not None]
    first = list(scaled[:4]) + [None] * (4 - min(4, len(scaled)))
    numbers = [0.0 if value is None else value for value in first]
    numbers += [0.0 if value is None else 1.0 for value in first]
    if not known:
        return [*numbers, 0.0, 0.0, 0.0, 0.0]
    mean = sum(known) / len(known)
    spread = math.sqrt(sum((value - mean) ** 2 for value in known) / len(known))
    return [*numbers, mean, max(known), spread, len(known) / HISTORY]


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        return 1e12
    return min(max(number, 0.0), 1e12) if math.isfinite(number) else 0.0


def _log(value: float) -> float:
    return math.log1p(_finite(value)) / 2.0


def _log_s(seconds: float) -> float:
    return math.log(_finite(seconds) + 1e-3) / 2.0


def _ends(text: str) -> bytes:
    if len(text) > HEAD + TAIL:
        text = text[:HEAD] + " " + text[-TAIL:]
    return text.encode("utf-8", "replace")


def _cues(text: bytes) -> list[float]:
    return [1.0 if cue in text else 0.0 for cue in _CUES]


@lru_cache(maxsize=4096)
def _bucket(name: str, buckets: int) -> int:
    return zlib.crc32(name.encode("utf-8", "replace")) % buckets


def _write_words(row: Vectors, text: bytes) -> None:
    """Write the words of a text by signed feature hashing, with the same norm for every text."""
    words = _WORD.findall(text)
    if len(words) > MOST_WORDS:
        words = words[: MOST_WORDS // 3] + words[-2 * MOST_WORDS // 3 :]
    counts: dict[int, int] = {}
    for word in words:
        hashed = zlib.crc32(word)
        bucket = hashed % len(row)
        counts[bucket] = counts.get(bucket, 0) + (1 if hashed & 0x8000_0000 else -1)
    if not counts:
        return
    values = np.fromiter(counts.values(), np.float32, len(counts))
    values = np.sign(values) * np.log1p(np.abs(values))
    norm = float(np.sqrt((values * values).sum()))
    if norm > 0:
        row[np.fromiter(counts.keys(), np.int64, len(counts))] = values * (4.0 / norm)
