"""Mooncake's public traces (kvcache-ai/Mooncake, FAST'25): one request a line, in the order of time.

A line has ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and ``hash_ids``, one for each block of
512 tokens of the prompt. Requests have no session. A request continues an earlier one if its prompt begins with all
whole blocks of it, and no other prompt goes on differently after them: blocks after which prompts differ are a shared
prefix. Both directions hold a file in memory, because lines are in the order of time and not of programs.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import MAX_ARRIVAL_S, MAX_TOKENS, RecordedProgram, lines_of, parsed
from cluster.offline.traces.blocks import BlockIds, common_prefixes, other_prefixes, shared_prefix
from cluster.offline.traces.calls import UNNAMED_TOOL, Call, program, turns_of
from cluster.offline.traces.format import Options, TraceFormat
from cluster.offline.traces.losses import Losses


class MooncakeRow(BaseModel):
    """A line of a trace. Other keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    timestamp: Annotated[float, Field(ge=0, le=MAX_ARRIVAL_S * 1000, allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    hash_ids: tuple[int, ...] = Field(strict=False)


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    """Number of its line."""
    row: MooncakeRow
    whole: tuple[int, ...]
    """Ids of the blocks that the prompt fills."""


def read(path: Path, options: Options, losses: Losses) -> Iterator[tuple[str, RecordedProgram]]:
    """Read the requests of a file and find the programs that they belong to."""
    requests = sorted(_requests(path, options.block_tokens), key=lambda request: request.row.timestamp)
    programs = _programs(requests)
    prompts = [turns[0].whole for turns in programs]
    prefixes = common_prefixes(prompts)
    losses.add("another prefix that some programs share (programs)", other_prefixes(prompts, prefixes))
    for turns in programs:
        first = turns[0]
        where = f"{path}:{first.number}"
        yield (
            where,
            program(
                where,
                program_id=f"{_stem(path)}-{first.number}",
                arrival_s=first.row.timestamp / 1000,
                shared_prefix=shared_prefix(first.whole, prefixes, options.block_tokens),
                turns=turns_of([*_calls(turns, losses)]),
            ),
        )


def _requests(path: Path, block_tokens: int) -> Iterator[_Request]:
    for number, line in lines_of(path):
        where = f"{path}:{number}"
        row = parsed(line, where, MooncakeRow)
        blocks = -(-row.input_length // block_tokens)
        if len(row.hash_ids) != blocks:
            raise TraceError(
                f"{where}: hash_ids: {len(row.hash_ids)} blocks, but input_length {row.input_length} makes {blocks} "
                f"of {block_tokens} tokens (another size of blocks: --block-tokens)"
            )
        yield _Request(number, row, row.hash_ids[: row.input_length // block_tokens])


def _programs(requests: Sequence[_Request]) -> list[list[_Request]]:
    """Group requests, which are in the order of time, into programs."""
    branching = _branching(requests)
    programs: list[list[_Request]] = []
    last_block: dict[int, list[_Request]] = {}
    """By the last whole block of its latest request, a program that can be continued."""
    for request in requests:
        turns = _continued(request, last_block)
        if turns is None:
            turns = []
            programs.append(turns)
        else:
            del last_block[turns[-1].whole[-1]]
        turns.append(request)
        if request.whole and request.whole[-1] not in branching:
            last_block[request.whole[-1]] = turns
    return programs


def _branching(requests: Iterable[_Request]) -> set[int]:
    """Return the blocks after which prompts differ."""
    following: dict[int, int] = {}
    branching: set[int] = set()
    for request in requests:
        for block, after in zip(request.whole, request.whole[1:], strict=False):
            if following.setdefault(block, after) != after:
                branching.add(block)
    return branching


def _continued(request: _Request, last_block: dict[int, list[_Request]]) -> list[_Request] | None:
    for number, block in reversed(list(enumerate(request.whole, 1))):
        turns = last_block.get(block)
        if turns is None or turns[-1].row.input_length > request.row.input_length:
            continue
        if len(turns[-1].whole) == number:
            return turns
    return None


def _calls(turns: Sequence[_Request], losses: Losses) -> Iterator[Call]:
    for request, following in zip(turns, [*turns[1:], None], strict=True):
        lengths = request.row.input_length, request.row.output_length
        if following is None:
            yield Call(*lengths)
            continue
        pause_s = (following.row.timestamp - request.row.timestamp) / 1000
        losses.add("time of generation, which is part of the pause after it (turns)", pause_s > 0)
        yield Call(*lengths, UNNAMED_TOOL if pause_s else None, pause_s if pause_s else None)


def write(programs: Iterable[RecordedProgram], file: BinaryIO, options: Options, losses: Losses) -> None:
    """Write the turns of all programs in the order of time. A turn starts when the pause before it ends."""
    blocks = BlockIds(options.block_tokens)
    rows: list[tuple[int, bytes]] = []
    for number, recorded in enumerate(programs):
        _count_losses(recorded, options, losses)
        arrival_s = number * options.every_s if recorded.arrival_s is None else recorded.arrival_s
        now_ms = round(arrival_s * 1000)
        ids: list[int] = []
        for index, turn in enumerate(recorded.turns):
            starts = index == 0 or turn.reset is not None
            before = recorded.turns[index - 1]
            ids = blocks.start(recorded, turn) if starts else blocks.continued(ids, before, turn)
            lacks_block = turn.context_tokens // options.block_tokens == (
                blocks.shared_blocks(recorded, turn) if starts else 0
            )
            losses.add("certain link between turns, because the prompt fills no block of its own (turns)", lacks_block)
            row = {
                "timestamp": now_ms,
                "input_length": turn.context_tokens,
                "output_length": turn.output_tokens,
                "hash_ids": ids,
            }
            rows.append((now_ms, json.dumps(row).encode()))
            now_ms += 0 if index == len(recorded.turns) - 1 else round((turn.tool_duration_s or 0.0) * 1000)
    rows.sort(key=lambda row: row[0])
    file.writelines(line + b"\n" for _, line in rows)


def _count_losses(recorded: RecordedProgram, options: Options, losses: Losses) -> None:
    paused = recorded.turns[:-1]
    losses.add("names of programs (programs)")
    losses.add(
        "category, source, split group (programs)", bool(recorded.category or recorded.source or recorded.split_group)
    )
    losses.add(
        f"unrecorded arrival, written {options.every_s:g} s after the one before (programs)", recorded.arrival_s is None
    )
    losses.add("mark of a program that did not end by itself (programs)", recorded.incomplete is not None)
    losses.add("parent of a program (programs)", recorded.parent_program_id is not None)
    losses.add("time of generation, which is not recorded and counts as 0 (turns)", len(paused))
    losses.add("names of tools (turns)", sum(turn.tool is not None for turn in paused))
    losses.add(
        "unrecorded duration of a tool, written as 0 (turns)",
        sum(turn.tool is not None and turn.tool_duration_s is None for turn in paused),
    )
    losses.add("split of new tokens into result and prompt (turns)", len(paused))
    losses.add("kept part of the output (turns)", sum(turn.kept != turn.output_tokens for turn in paused))
    losses.add(
        "context that starts anew, written as another program (turns)",
        sum(turn.reset is not None for turn in recorded.turns[1:]),
    )
    tokens = (recorded.shared_prefix.tokens or 0) if recorded.shared_prefix else 0
    losses.add("tokens of a shared prefix that fill no block (programs)", tokens % options.block_tokens > 0)
    losses.add("name of the shared prefix (programs)", recorded.shared_prefix is not None)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


FORMAT = TraceFormat(
    "arrival, prompt and output tokens of each request, shared blocks of prompts; requests are linked by their blocks",
    read,
    write,
)
