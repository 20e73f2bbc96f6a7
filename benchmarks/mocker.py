"""Replays agent programs in Dynamo's mocker: converts them to its trace, runs it, and reads its results.

The mocker is a simulator of vLLM's scheduler in Rust (aisimulate-core, which is compiled into ai-dynamo-runtime). It
replays sessions: a turn is due a delay after the end of the one before, as in our simulator. Its prompts consist of
blocks with ids. In the ``mooncake-delta`` format a turn has only what its prompt adds to the session's context, and the
output of the turn before is a part of that context, which stays in the cache.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.core.slo import Outcome, TurnRecord
from cluster.offline.bench.runner import Job
from cluster.offline.bench.workload import PlannedProgram

BLOCK_SIZE = 16
TRACE_FORMAT = "mooncake-delta"
MS = 1e3
GROUP_IDS = 1 << 20
"""Ids of blocks reserved for each shared prefix. Ids of all other blocks are used once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory and the limits of a step of one worker."""

    blocks: int
    """Usable KV blocks of `BLOCK_SIZE` tokens."""
    step_tokens: int
    step_sequences: int

    def engine(self, timing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mocker's configuration of a vLLM worker with these limits. The rest are its defaults."""
        return {
            "engine": {
                "backend": "vllm",
                "num_gpu_blocks": self.blocks,
                "block_size": BLOCK_SIZE,
                "max_num_seqs": self.step_sequences,
                "max_num_batched_tokens": self.step_tokens,
                "timing_model": dict(timing),
            }
        }


def is_expressible(program: PlannedProgram) -> bool:
    """Return whether the mocker's trace can express the program.

    Its context has to grow only: each turn's whole output stays in it, no turn begins anew, and each adds a token.
    """
    kept = all(turn.kept_tokens == turn.output_tokens for turn in program.turns[:-1])
    return kept and all(not turn.reset and turn.fresh_tokens > 0 for turn in program.turns)


def trace_lines(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Yield one line for each turn, ordered by job and turn.

    Raises:
        ValueError: a program cannot be expressed.
    """
    groups: dict[str, int] = {}
    for job in jobs:
        program = job.program
        if program.prefix_group is not None:
            groups.setdefault(program.prefix_group, len(groups))
    next_id = len(groups) * GROUP_IDS
    for job in jobs:
        program = job.program
        if not is_expressible(program):
            raise ValueError(f"{job.program_id}: a context that does not only grow cannot be expressed")
        for index, turn in enumerate(program.turns):
            shared = 0
            if index == 0 and program.prefix_group is not None:
                shared = min(program.prefix_tokens, turn.fresh_tokens) // BLOCK_SIZE
            own = -(-turn.fresh_tokens // BLOCK_SIZE) - shared
            first = groups[program.prefix_group] * GROUP_IDS if shared and program.prefix_group is not None else 0
            line: dict[str, Any] = {
                "request_id": f"{job.program_id}.{index}",
                "session_id": job.program_id,
                "input_length": turn.fresh_tokens,
                "output_length": turn.output_tokens,
                "hash_ids": [*range(first, first + shared), *range(next_id, next_id + own)],
            }
            next_id += own
            if index:
                line["delay"] = program.turns[index - 1].pause_s * MS
            else:
                line["timestamp"] = job.arrival_s * MS
            yield line


def write_trace(jobs: Sequence[Job], path: Path) -> None:
    """Write the trace of these jobs."""
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in trace_lines(jobs))


def replay(trace: Path, limits: Limits, timing: Mapping[str, Any]) -> list[TurnRecord]:
    """Replay a trace on one worker under virtual time, and return its turns.

    Args:
        trace: a file that `write_trace` wrote.
        limits: those of the worker.
        timing: the mocker's ``timing_model``.
    """
    from dynamo.mocker.config import normalize_mocker_config
    from dynamo.replay.api import run_trace_replay

    report = run_trace_replay(
        [trace],
        extra_engine_args=normalize_mocker_config(limits.engine(timing)),
        num_workers=1,
        router_mode="round_robin",
        trace_format=TRACE_FORMAT,
        trace_block_size=BLOCK_SIZE,
        capture_per_request=True,
    )
    return records_of(report.per_request)


def records_of(requests: Sequence[Mapping[str, Any]]) -> list[TurnRecord]:
    """Return the turns of a replay's report, by session and turn.

    Raises:
        ValueError: a turn has another number of tokens than the trace asks for.
    """
    return sorted(map(_record, requests), key=lambda record: (record.program_id, record.index))


def _record(request: Mapping[str, Any]) -> TurnRecord:
    name = f"{request['session_id']}.{request['turn_index']}"
    completed = request["terminal_status"] == "completed"
    if completed and request["output_length"] != request["requested_output_length"]:
        raise ValueError(f"{name}: {request['output_length']} tokens, not {request['requested_output_length']}")
    record = TurnRecord(
        program_id=request["session_id"],
        index=request["turn_index"],
        intended_start_s=request["arrival_time_ms"] / MS,
        outcome=Outcome.OK if completed else Outcome.FAILED,
        prompt_tokens=request["input_length"],
        output_tokens=request["output_length"],
        cached_tokens=request["reused_input_tokens"],
    )
    if not completed:
        return record
    return replace(record, first_token_s=request["first_token_ms"] / MS, last_token_s=request["last_token_ms"] / MS)
