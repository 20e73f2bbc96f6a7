"""Traces of programs with sub-agents: a synthetic fan-out, and the sessions of kvtester_cc whose sub-agents are known.

    python -m benchmarks.trees fan-out fan_out.jsonl.gz
    python -m benchmarks.trees sessions ../shared/data/programs/kvtester_cc.jsonl.gz sessions.jsonl.gz
    caesura simulate --trace fan_out.jsonl.gz --preset llama-3.1-8b/h100 --policies vllm,caesura --rates 0.9x

A fan-out is a program that starts 8 sub-agents at once. Their prompts have the same beginning, and they have different
numbers of turns. Two of three programs of the trace are alone, with the same turns as a sub-agent.

In the recorded sessions, the ``spawn_offset_s`` of a sub-agent is the time of its end, in seconds from the beginning of
its session, as far as it can be matched: less the time that the sub-agent took, 37 of 46 are within seconds after the
end of a turn of the session. These get that turn as ``parent_turn``. Programs without sub-agents are left out.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.core.recorded_turn import lines_of

WIDTH = 8
"""Sub-agents of a fan-out."""
HEAD_TOKENS = 6000
"""Tokens with which the prompts of all sub-agents of a fan-out begin."""
ALONE = 2
"""Programs without sub-agents for each fan-out."""
SEED = 20_261
NEAR_S = 12.0
"""Largest time between the end of a session's turn and the start of its sub-agent, before and after (seconds)."""


def fan_outs(count: int) -> Iterator[dict[str, Any]]:
    """Yield the programs of ``count`` fan-outs, and of those beside them."""
    rng = np.random.default_rng(SEED)
    for number in range(count):
        name = f"fan-{number}"
        first = _turn(4000, 4000, int(rng.integers(150, 400)), "task", None, WIDTH * 250)
        context = first["context_tokens"] + first["output_tokens"] + first["tool_return_tokens"]
        answer = _turn(0, context, int(rng.integers(300, 700)), None, None, None)
        yield {"program_id": name, "category": "fan_out", "turns": [first, answer]}
        head = {"group": f"head-{number}", "tokens": HEAD_TOKENS}
        for child in range(WIDTH):
            yield {
                "program_id": f"{name}/{child}",
                "category": "sub_agent",
                "parent_program_id": name,
                "parent_turn": 0,
                "shared_prefix": head,
                "turns": _agent(rng, HEAD_TOKENS),
            }
        for other in range(ALONE):
            yield {"program_id": f"alone-{number}-{other}", "category": "alone", "turns": _agent(rng, HEAD_TOKENS)}


def _agent(rng: np.random.Generator, head: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    context = new = head + int(rng.integers(200, 1500))
    count = int(rng.integers(2, 9))
    for index in range(count):
        last = index == count - 1
        output = int(rng.integers(60, 400))
        returned = None if last else int(rng.integers(200, 2000))
        tool = None if last else "bash"
        duration_s = None if last else round(float(rng.lognormal(0.0, 1.0)), 3)
        turns.append(_turn(new, context, output, tool, duration_s, returned))
        context, new = context + output + (returned or 0), 0
    return turns


def _turn(
    new: int, context: int, output: int, tool: str | None, duration_s: float | None, returned: int | None
) -> dict[str, Any]:
    return {
        "new_prompt_tokens": new,
        "context_tokens": context,
        "output_tokens": output,
        "tool": tool,
        "tool_duration_s": duration_s,
        "tool_return_tokens": returned,
    }


def sessions(programs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the sessions that have sub-agents, and these with their ``parent_turn``."""
    by_id = {program["program_id"]: program for program in programs}
    children: dict[str, list[dict[str, Any]]] = {}
    for program in programs:
        parent = by_id.get(program.get("parent_program_id") or "")
        if parent is not None and (turn := _turn_before(parent, program)) is not None:
            children.setdefault(parent["program_id"], []).append({**program, "parent_turn": turn})
    for name, its in children.items():
        yield by_id[name]
        yield from its


def _turn_before(parent: dict[str, Any], child: dict[str, Any]) -> int | None:
    """Return the turn of ``parent`` at whose end ``child`` began. None: no turn ended at about that time."""
    began_s = child["spawn_offset_s"] - sum(_seconds(turn) for turn in child["turns"])
    now_s, found = 0.0, None
    for index, turn in enumerate(parent["turns"][:-1]):
        end_s = now_s + (turn["llm_s"] or 0.0)
        if end_s - NEAR_S <= began_s <= end_s + NEAR_S:
            found = index
        now_s += _seconds(turn)
    return found


def _seconds(turn: dict[str, Any]) -> float:
    return float((turn["llm_s"] or 0.0) + (turn["tool_duration_s"] or 0.0))


def _write(path: Path, programs: Iterable[dict[str, Any]]) -> int:
    count = 0
    with gzip.open(path, "wt") as file:
        for program in programs:
            file.write(json.dumps(program) + "\n")
            count += 1
    return count


def main() -> None:
    """Write a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    fan_out = kinds.add_parser("fan-out")
    fan_out.add_argument("--count", type=int, default=400, help="fan-outs")
    recorded = kinds.add_parser("sessions")
    recorded.add_argument("recorded", type=Path, help="kvtester_cc.jsonl.gz")
    for each in (fan_out, recorded):
        each.add_argument("target", type=Path)
    given = parser.parse_args()
    if given.kind == "fan-out":
        written = _write(given.target, fan_outs(given.count))
    else:
        written = _write(given.target, sessions([json.loads(line) for _, line in lines_of(given.recorded)]))
    print(f"{given.target}: {written} programs")


if __name__ == "__main__":
    main()
