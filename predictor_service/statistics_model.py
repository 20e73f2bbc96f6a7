"""The model `statistics`: it counts the outcomes of similar turns at levels (`predictor_service.level_counts`).

The model learns from each turn at once, while it serves. It reads no text. The features of a turn are its source, its
position, and the tools and lengths of the turns before it.
"""

import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from cluster.core.program import USER_REPLY, without_class
from cluster.durations.statistics import LONGEST_S
from cluster.durations.table import MAX_TOOL_NAME_BYTES
from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, MOST_S, SHORTEST_S, Distribution, Floats
from predictor_service.examples import ProgramExample, teach
from predictor_service.level_counts import (
    HistogramRow,
    Key,
    LevelHistograms,
    LevelNames,
    NameRow,
    Place,
    Shrinkage,
    View,
)
from predictor_service.model import NO_TOOL, PauseContext, PauseOutcome, Remaining, TurnContext, TurnOutcome

_MODEL = "statistics"
FILE = "statistics.msgpack"
VERSION = 1
LARGEST_BYTES = 256 << 20
MOST_TOKENS_SEEN = 1 << 31
"""Largest valid length in tokens."""

TURN_EDGES: Floats = np.concatenate([np.arange(65) - 0.5, np.geomspace(64, 4096, 33)[1:]])
"""Edges of the bins of remaining turns: one bin for each number up to 64, then bins of equal ratios."""
_TURN_CENTRES = (TURN_EDGES[:-1] + TURN_EDGES[1:]) / 2

_LENGTH = Shrinkage(trunk=(1.0, 4.0, 4.0, 8.0), weight=0.65, general=0.03)
_PAUSE = Shrinkage(trunk=(1.0, 3.0), general=0.14)
_REMAINING = Shrinkage(trunk=(1.0, 4.0, 8.0))
_PER_DECADE = 3
"""Classes of durations per decade."""
_CALLS = 3
"""Earlier calls of the same kind whose durations are averaged, at most."""
_SMALL_SHARE = 0.02
"""Total probability of the offered tools that were never called."""


_ARRAY = b"\xdd"
"""The first byte of an array in msgpack whose length has 4 bytes."""

Encoding = Generator[None, None, bytes]
"""Steps of a few milliseconds, and at their end what was encoded."""


def result_of(steps: Encoding) -> bytes:
    """Take all steps at once, and return what was encoded."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(end.value)


class _Store(msgspec.Struct, array_like=True):
    """The stored format, in msgpack after its CRC-32."""

    version: int
    histograms: dict[str, list[HistogramRow]]
    names: list[NameRow]


class StatisticsModel:
    """A LengthModel, ToolModel, DurationModel and Learner. It must be used by one thread at a time, except
    `read_others`.
    """

    def __init__(self) -> None:
        self._lengths = LevelHistograms(LENGTH_EDGES, 200.0, _LENGTH)
        self._tools = LevelNames()
        self._durations = LevelHistograms(DURATION_EDGES, 2.0, _PAUSE)
        self._returned = LevelHistograms(LENGTH_EDGES, 200.0, _PAUSE)
        self._left_tokens = LevelHistograms(LENGTH_EDGES, 2000.0, _REMAINING)
        self._left_turns = LevelHistograms(TURN_EDGES, 5.0, _REMAINING)

    @property
    def _histograms(self) -> dict[str, LevelHistograms]:
        return {
            "lengths": self._lengths,
            "durations": self._durations,
            "returned": self._returned,
            "left_tokens": self._left_tokens,
            "left_turns": self._left_turns,
        }

    # --- answers ---

    def lengths(self, turns: Sequence[TurnContext]) -> list[Distribution]:
        """See `LengthModel`."""
        return [Distribution(LENGTH_EDGES, self._lengths.shares(_length_place(turn))) for turn in turns]

    def remaining(self, turns: Sequence[TurnContext]) -> list[Remaining]:
        """See `LengthModel`."""
        answers = []
        for turn in turns:
            place = _remaining_place(turn)
            expected = float(self._left_turns.shares(place) @ _TURN_CENTRES)
            answers.append(Remaining(Distribution(LENGTH_EDGES, self._left_tokens.shares(place)), max(0.0, expected)))
        return answers

    def tools(self, turns: Sequence[TurnContext]) -> list[Mapping[str, float]]:
        """See `ToolModel`. If tools are offered, only those, `NO_TOOL` and waiting for the user are predicted."""
        return [_offered(self._tools.shares(_tool_path(turn)), turn.offered) for turn in turns]

    def durations(self, pauses: Sequence[PauseContext]) -> list[Distribution]:
        """See `DurationModel`."""
        return [Distribution(DURATION_EDGES, self._durations.shares(_duration_place(pause))) for pause in pauses]

    def returned(self, pauses: Sequence[PauseContext]) -> list[Distribution]:
        """See `DurationModel`."""
        return [Distribution(LENGTH_EDGES, self._returned.shares(_returned_place(pause))) for pause in pauses]

    # --- learning ---

    def turn_ended(self, turn: TurnContext, outcome: TurnOutcome) -> None:
        """See `Learner`."""
        _check_tokens(outcome.output_tokens)
        self._lengths.add(_length_place(turn), outcome.output_tokens)
        self._tools.add(_tool_path(turn), _name(outcome.tool))

    def pause_ended(self, pause: PauseContext, outcome: PauseOutcome) -> None:
        """See `Learner`."""
        if outcome.duration_s is not None and not 0 <= outcome.duration_s <= LONGEST_S:
            raise ValueError(f"not a duration: {outcome.duration_s} s")
        if outcome.returned_tokens is not None:
            _check_tokens(outcome.returned_tokens)
            self._returned.add(_returned_place(pause), outcome.returned_tokens)
        if outcome.duration_s is not None:
            self._durations.add(_duration_place(pause), outcome.duration_s)

    def program_ended(self, turns: Sequence[TurnContext], remaining: Sequence[tuple[int, int]]) -> None:
        """See `Learner`."""
        if len(turns) != len(remaining):
            raise ValueError(f"{len(remaining)} remainders of {len(turns)} turns")
        for tokens, later in remaining:
            _check_tokens(tokens)
            _check_tokens(later)
        for turn, (tokens, later) in zip(turns, remaining, strict=True):
            place = _remaining_place(turn)
            self._left_tokens.add(place, tokens)
            self._left_turns.add(place, later)

    @classmethod
    def fit(cls, programs: Iterable[ProgramExample]) -> Self:
        """Make a model that has learnt from ``programs``."""
        model = cls()
        for program in programs:
            teach(model, program)
        return model

    # --- sharing and keeping ---

    def to_bytes(self) -> bytes:
        """Encode this model's own counts, without those of other writers."""
        return result_of(self.encoding())

    def encoding(self) -> Encoding:
        """Return the steps of `to_bytes`. The model may learn between two steps."""
        histograms = {}
        for name, table in self._histograms.items():
            histograms[name] = yield from _encoded(table.rows())
        names = yield from _encoded(self._tools.rows())
        yield
        content = msgspec.msgpack.encode((VERSION, histograms, names))  # a _Store
        yield
        return zlib.crc32(content).to_bytes(4) + content

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode the result of ``to_bytes``.

        Raises:
            ValueError: the bytes are damaged, are no statistics, or have another version.
        """
        model = cls()
        model.merge(data)
        return model

    def merge(self, data: bytes) -> None:
        """Add the ``to_bytes`` of another model to this model's own counts.

        Raises:
            ValueError: see ``from_bytes``; a part of the counts may have been added.
        """
        store = _decoded(data)
        for name, table in self._histograms.items():
            table.put(store.histograms.get(name, []))
        self._tools.put(store.names)

    def replace_others(self, others: Iterable[bytes]) -> None:
        """Replace the counts of other writers by these ``to_bytes``. They are used in predictions, but never written.

        Raises:
            ValueError: see ``from_bytes``.
        """
        self.read_others(others)()

    def read_others(self, others: Iterable[bytes]) -> Callable[[], None]:
        """Read these ``to_bytes``, and return the function that does the rest of `replace_others`.

        The model is neither changed nor used, so that another thread may read while the model is used.

        Raises:
            ValueError: see ``from_bytes``.
        """
        stores = [_decoded(data) for data in others]
        histograms = [
            (table, table.read_others(store.histograms.get(name, []) for store in stores))
            for name, table in self._histograms.items()
        ]
        names = self._tools.read_others(store.names for store in stores)

        def use() -> None:
            for table, total in histograms:
                table.use_others(total)
            self._tools.use_others(names)

        return use

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle.

        Raises:
            ConfigError: it cannot be written.
        """
        write_bundle(directory, Bundle(_MODEL, VERSION, origin or Origin(), parts={FILE: self.to_bytes()}))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a bundle that `save` wrote.

        Raises:
            ConfigError: it is no complete bundle of this model and version; the message names the file and the field.
        """
        bundle = read_bundle(directory, _MODEL, VERSION)
        with bundle.reading(directory):
            return cls.from_bytes(bundle.part(FILE))


def _encoded(parts: Iterator[Sequence[HistogramRow] | Sequence[NameRow]]) -> Generator[None, None, msgspec.Raw]:
    """Encode rows as one array of msgpack, a part in each step."""
    count, encoded = 0, []
    for part in parts:
        count += len(part)
        encoded.append(b"".join(map(msgspec.msgpack.encode, part)))
        yield
    return msgspec.Raw(_ARRAY + count.to_bytes(4) + b"".join(encoded))


def _decoded(data: bytes) -> _Store:
    if len(data) > LARGEST_BYTES:
        raise ValueError(f"statistics have at most {LARGEST_BYTES} bytes, not {len(data)}")
    if len(data) < 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4]):
        raise ValueError("damaged, or no statistics")
    try:
        store = msgspec.msgpack.decode(data[4:], type=_Store)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not statistics: {error}") from error
    if store.version != VERSION:
        raise ValueError(f"version {store.version} of statistics, not {VERSION}")
    return store


# --- levels: from the general to the particular ---


def _length_place(turn: TurnContext) -> Place:
    source, last = _name(turn.source), _last_tool(turn)
    tool = without_class(last)
    trunk: list[Key] = [(), (source,), (source, tool), (source, tool, last)]
    return Place(
        trunk,
        [
            View((*trunk[-1], "brought", _size_class(turn.new_tokens, 1.0)), 3),
            View((*trunk[-1], "before", _tool_before(turn)), 3),
            View((*trunk[-1], "usual", _size_class(_typical(turn.outputs), 1.5)), 3),
            View((source, "last", _size_class(turn.outputs[0] if turn.outputs else 0, 1.5)), 1),
        ],
    )


def _remaining_place(turn: TurnContext) -> Place:
    """Return the levels of the remaining work. No level may be specific to one program, whose turns share one end."""
    source = _name(turn.source)
    trunk: list[Key] = [(), (source,), (source, _position_class(turn.position))]
    if not turn.tools:
        # Only one turn of a program is its first one, so the size of its prompt may name a level.
        return Place(trunk, [View((*trunk[-1], "prompt", _size_class(turn.prompt_tokens, 1.0)), 2)])
    return Place(trunk, [View((source, "last", _last_tool(turn), _tool_before(turn)), 1)])


def _tool_path(turn: TurnContext) -> list[Key]:
    source, last = _name(turn.source), _last_tool(turn)
    return [(), (source,), (source, last), (source, last, _tool_before(turn))]


def _duration_place(pause: PauseContext) -> Place:
    trunk = _call_trunk(pause)
    before = [
        (_name(called), seconds)
        for called, seconds in zip(pause.turn.tools, pause.turn.durations_s, strict=False)
        if seconds is not None and 0 <= seconds <= LONGEST_S
    ]
    views = [View((*trunk[-1], "length", _size_class(pause.output_tokens, 1.0)), 3)]
    if same := [seconds for called, seconds in before if called == _name(pause.tool)]:
        views.append(View((*trunk[-1], "same", _duration_class(same[:_CALLS])), 3))
    tool = without_class(_name(pause.tool))
    if alike := [seconds for called, seconds in before if without_class(called) == tool]:
        views.append(View((*trunk[-1], "alike", _duration_class(alike[:1])), 3))
    return Place(trunk, views)


def _returned_place(pause: PauseContext) -> Place:
    trunk = _call_trunk(pause)
    views = [View((*trunk[-1], "length", _size_class(pause.output_tokens, 1.0)), 3)]
    before = zip(pause.turn.tools, pause.turn.returned, strict=False)
    if same := [tokens for called, tokens in before if called == pause.tool]:
        views.append(View((*trunk[-1], "same", _size_class(same[0], 1.0)), 3))
    return Place(trunk, views)


def _call_trunk(pause: PauseContext) -> list[Key]:
    called = _name(pause.tool)
    tool = without_class(called)
    return [(), (tool,), (tool, called), (tool, called, _name(pause.turn.source))]


def _tool_before(turn: TurnContext) -> str:
    return _name(turn.tools[1]) if len(turn.tools) > 1 else "start"


def _typical(lengths: Sequence[int]) -> float:
    """Return the geometric mean of lengths (of 1 + length, minus 1); 0 for a first turn."""
    return (
        math.expm1(sum(math.log1p(min(max(0, length), MOST_TOKENS_SEEN)) for length in lengths) / len(lengths))
        if lengths
        else 0.0
    )


def _size_class(size: float, per_octave: float) -> str:
    return str(int(per_octave * math.log2(1 + min(max(0, size), MOST_TOKENS_SEEN))))


def _last_tool(turn: TurnContext) -> str:
    return "start" if not turn.tools else _name(turn.tools[0])


def _position_class(position: int) -> str:
    """Return a class of positions: one class for each position below 8, then three classes per octave."""
    return f"~{int(3 * math.log2(min(position, MOST_TOKENS_SEEN)))}" if position >= 8 else str(position)


def _duration_class(seconds: Sequence[float]) -> str:
    logarithms = [math.log10(min(max(each, SHORTEST_S), MOST_S)) for each in seconds]
    return str(round(_PER_DECADE * sum(logarithms) / len(logarithms)))


def _name(text: str) -> str:
    """Return the name under which a name is counted. All names that are too long to be kept share one."""
    return (
        text
        if len(text) <= MAX_TOOL_NAME_BYTES // 4 or len(text.encode("utf-8", "surrogatepass")) <= MAX_TOOL_NAME_BYTES
        else "..."
    )


def _offered(shares: dict[str, float], offered: Sequence[str]) -> dict[str, float]:
    if offered:
        names = frozenset(offered)
        shares = {
            tool: share
            for tool, share in shares.items()
            if tool in (NO_TOOL, USER_REPLY) or names.issuperset(without_class(tool).split("+"))
        }
        new = names - {without_class(tool) for tool in shares}
        total = sum(shares.values())
        part = total * _SMALL_SHARE / len(new) if new and total else 1.0 / max(1, len(new))
        shares |= dict.fromkeys(new, part)
    total = sum(shares.values())
    return {tool: share / total for tool, share in shares.items()} if total else {NO_TOOL: 1.0}


def _check_tokens(tokens: float) -> None:
    if not 0 <= tokens <= MOST_TOKENS_SEEN:
        raise ValueError(f"not a length: {tokens} tokens")
