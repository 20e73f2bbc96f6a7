"""AIPerf's datasets of sessions (NVIDIA AIPerf 0.13): ``mooncake_trace`` with sessions, and ``multi_turn``.

A line of ``mooncake_trace`` is one turn. ``input_length`` counts the new tokens of the turn only, because AIPerf sends
the session's earlier prompts and answers before them. ``delay`` (ms) is the pause before the turn. `aiperf synthesize
agentic-code` writes this form; so does `write`. A line of ``multi_turn`` is a session with the texts of its turns,
whose tokens a tokenizer has to count. Sessions are in memory while a file is read; writing goes line by line.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from cluster.core.errors import ConfigError, TraceError
from cluster.core.recorded_turn import MAX_ARRIVAL_S, MAX_TOKENS, RecordedProgram, lines_of, parsed
from cluster.offline.traces.blocks import BlockIds, common_prefixes, other_prefixes, shared_prefix
from cluster.offline.traces.calls import UNNAMED_TOOL, Call, program, turns_of
from cluster.offline.traces.format import Options, TraceFormat
from cluster.offline.traces.losses import Losses

_Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
_Ms = Annotated[float, Field(ge=0, le=MAX_ARRIVAL_S * 1000, allow_inf_nan=False)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class TextTurn(_Row):
    """A turn of a line of ``multi_turn``."""

    text: str | None = None
    texts: tuple[str, ...] | None = Field(None, strict=False)
    role: str | None = None
    delay: _Ms | None = None
    timestamp: _Ms | None = None
    output_length: _Tokens | None = None
    image: Any = None
    images: Any = None
    audio: Any = None
    audios: Any = None
    video: Any = None
    videos: Any = None


class SessionRow(_Row):
    """A line of ``multi_turn``."""

    session_id: str | None = None
    turns: tuple[TextTurn, ...] = Field(strict=False, min_length=1)


class TurnRow(_Row):
    """A line of ``mooncake_trace``."""

    session_id: str | None = None
    input_length: _Tokens | None = None
    text_input: str | None = None
    messages: Any = None
    payload: Any = None
    output_length: _Tokens | None = None
    hash_ids: tuple[int, ...] | None = Field(None, strict=False)
    timestamp: _Ms | None = None
    delay: _Ms | None = None
    extra: Any = None


class _Kind(_Row):
    turns: Any = None


@dataclass(frozen=True, slots=True)
class _Turn:
    where: str
    new_tokens: int
    output_tokens: int
    delay_ms: float | None
    timestamp_ms: float | None
    hash_ids: tuple[int, ...] = ()


class _Texts:
    """Counts the tokens of texts."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._tokenizer = None if path is None else Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower class
            raise ConfigError(f"--tokenizer: {path}: {error}") from error

    def tokens(self, text: str, where: str) -> int:
        """Return the number of tokens of ``text``, at least 1.

        Raises:
            TraceError: there is no tokenizer. The message begins with ``where``.
        """
        if self._tokenizer is None:
            raise TraceError(
                f"{where}: a text without its number of tokens; count them with --tokenizer tokenizer.json"
            )
        return max(1, len(self._tokenizer.encode(text, add_special_tokens=False).ids))


def read(path: Path, options: Options, losses: Losses) -> Iterator[tuple[str, RecordedProgram]]:
    """Read the sessions of a file, in the order of their first turns."""
    sessions: dict[str, list[_Turn]] = {}
    texts = _Texts(options.tokenizer)
    for number, line in lines_of(path):
        where = f"{path}:{number}"
        if parsed(line, where, _Kind).turns is not None:
            session = parsed(line, where, SessionRow)
            turns = [*_text_turns(session, where, options, texts, losses)]
            session_id = session.session_id
        else:
            row = parsed(line, where, TurnRow)
            turns = [_turn(row, where, options, texts, losses)]
            session_id = row.session_id
        sessions.setdefault(session_id or f"line-{number}", []).extend(turns)
    prompts = [turns[0].hash_ids[: turns[0].new_tokens // options.block_tokens] for turns in sessions.values()]
    prefixes = common_prefixes(prompts)
    losses.add("another prefix that some sessions share (sessions)", other_prefixes(prompts, prefixes))
    for (session_id, turns), prompt in zip(sessions.items(), prompts, strict=True):
        arrival_ms = turns[0].timestamp_ms
        losses.add("delay before a session's first turn (sessions)", bool(turns[0].delay_ms))
        yield (
            turns[0].where,
            program(
                turns[0].where,
                program_id=session_id,
                arrival_s=None if arrival_ms is None else arrival_ms / 1000,
                shared_prefix=shared_prefix(prompt, prefixes, options.block_tokens),
                turns=turns_of([*_calls(turns, losses)]),
            ),
        )


def _turn(row: TurnRow, where: str, options: Options, texts: _Texts, losses: Losses) -> _Turn:
    if row.messages is not None or row.payload is not None:
        field = "payload" if row.messages is None else "messages"
        raise TraceError(f"{where}: {field}: a request without token lengths cannot be converted; give input_length")
    if (row.input_length is None) == (row.text_input is None):
        raise TraceError(f"{where}: input_length: give either it or text_input")
    if row.input_length is not None:
        new_tokens, blocks = row.input_length, -(-row.input_length // options.block_tokens)
    else:
        new_tokens, blocks = texts.tokens(row.text_input or "", f"{where}: text_input"), 0
        losses.add("text of a prompt, counted without a chat template (turns)")
    if row.hash_ids and len(row.hash_ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids: {len(row.hash_ids)} blocks, but input_length {row.input_length} makes {blocks} of "
            f"{options.block_tokens} tokens (another size of blocks: --block-tokens)"
        )
    losses.add("extra fields of a request (turns)", bool(row.extra))
    output = _output(row.output_length, f"{where}: output_length", options, losses)
    return _Turn(where, new_tokens, output, row.delay, row.timestamp, row.hash_ids or ())


def _text_turns(session: SessionRow, where: str, options: Options, texts: _Texts, losses: Losses) -> Iterator[_Turn]:
    """Yield the turns of a session of texts. A leading system text is part of the first turn's prompt."""
    system = 0
    for index, turn in enumerate(session.turns):
        key = f"{where}: turns.{index}"
        for medium in ("image", "images", "audio", "audios", "video", "videos"):
            losses.add(f"{medium} (turns)", bool(getattr(turn, medium)))
        if turn.text is None and not turn.texts:
            raise TraceError(f"{key}.text: missing, and there are no texts")
        tokens = sum(texts.tokens(text, f"{key}.text") for text in (turn.texts or (turn.text or "",)))
        losses.add("text of a prompt, counted without a chat template (turns)")
        if index == 0 and turn.role == "system" and len(session.turns) > 1:
            system = tokens
            continue
        output = _output(turn.output_length, f"{key}.output_length", options, losses)
        yield _Turn(where, system + tokens, output, turn.delay, turn.timestamp)
        system = 0


def _output(recorded: int | None, key: str, options: Options, losses: Losses) -> int:
    if recorded is not None:
        return recorded
    if options.output_tokens is None:
        raise TraceError(f"{key}: missing; choose a length for all such turns with --output-tokens")
    losses.add("missing output_length, replaced by --output-tokens (turns)")
    return options.output_tokens


def _calls(turns: list[_Turn], losses: Losses) -> Iterator[Call]:
    context = 0
    for index, turn in enumerate(turns):
        context += turn.new_tokens
        pause_s = _pause_s(turn, turns[index + 1], losses) if index + 1 < len(turns) else 0.0
        yield Call(context, turn.output_tokens, UNNAMED_TOOL if pause_s else None, pause_s if pause_s else None)
        context += turn.output_tokens


def _pause_s(turn: _Turn, following: _Turn, losses: Losses) -> float:
    if following.delay_ms is not None:
        return following.delay_ms / 1000
    if turn.timestamp_ms is None or following.timestamp_ms is None:
        return 0.0
    if following.timestamp_ms < turn.timestamp_ms:
        raise TraceError(f"{following.where}: timestamp: earlier than that of the turn before it in its session")
    losses.add("time of generation, which is part of the pause after it (turns)")
    return (following.timestamp_ms - turn.timestamp_ms) / 1000


def write(programs: Iterable[RecordedProgram], file: BinaryIO, options: Options, losses: Losses) -> None:
    """Write each program as one session of ``mooncake_trace``, or as several where its context starts anew."""
    blocks = BlockIds(options.block_tokens)
    for recorded in programs:
        _count_losses(recorded, options, losses)
        session_id, before_ms = recorded.program_id, None
        for index, turn in enumerate(recorded.turns):
            row: dict[str, Any] = {}
            if index == 0 or turn.reset is not None:
                session_id = recorded.program_id if index == 0 else f"{recorded.program_id}#{index}"
                before_ms = None
                row = {"input_length": turn.context_tokens}
                if blocks.shared_blocks(recorded, turn):
                    row["hash_ids"] = blocks.start(recorded, turn)
                if index == 0 and recorded.arrival_s is not None:
                    row["timestamp"] = recorded.arrival_s * 1000
            else:
                before = recorded.turns[index - 1]
                new = turn.context_tokens - before.context_tokens - before.kept
                losses.add("turn without new tokens, written with 1 (turns)", new < 1)
                row = {"input_length": max(1, new)}
            losses.add("turn without output, written with 1 token (turns)", turn.output_tokens < 1)
            row |= {"session_id": session_id, "output_length": max(1, turn.output_tokens)}
            if before_ms is not None:
                row["delay"] = before_ms
            before_ms = (turn.tool_duration_s or 0.0) * 1000
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _count_losses(recorded: RecordedProgram, options: Options, losses: Losses) -> None:
    paused = recorded.turns[:-1]
    labelled = bool(recorded.category or recorded.source or recorded.split_group)
    losses.add("category, source, split group (programs)", labelled)
    losses.add("mark of a program that did not end by itself (programs)", recorded.incomplete is not None)
    losses.add("parent of a program (programs)", recorded.parent_program_id is not None)
    losses.add("names of tools (turns)", sum(turn.tool is not None for turn in paused))
    unrecorded = sum(turn.tool is not None and turn.tool_duration_s is None for turn in paused)
    losses.add("unrecorded duration of a tool, written as 0 (turns)", unrecorded)
    losses.add("split of new tokens into result and prompt (turns)", len(paused))
    hidden = sum(turn.kept != turn.output_tokens for turn in paused)
    losses.add("output that is not sent again: AIPerf sends all of it, and contexts get longer (turns)", hidden)
    anew = sum(turn.reset is not None for turn in recorded.turns[1:])
    losses.add("context that starts anew, written as another session (turns)", anew)
    prefix = recorded.shared_prefix
    losses.add("name of the shared prefix (programs)", prefix is not None)
    tokens = (prefix.tokens or 0) if prefix else 0
    losses.add("tokens of a shared prefix that fill no block (programs)", tokens % options.block_tokens > 0)


FORMAT = TraceFormat(
    "session ids, new and generated tokens of each turn, pauses, arrivals, shared blocks of first prompts", read, write
)
