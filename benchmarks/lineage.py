"""How often the program of a turn is found by its messages alone, and what that costs.

    python -m benchmarks.lineage [--data DIRECTORY] [--programs 10000] [--concurrent 256] [--api chat]

The turns of recorded programs (their text, from the directory `text` of the data) are sent without ids to an index
that knows that many other programs. So many programs run at the same time, in an order drawn at random. A turn is
right if it gets the id of its own program's turn before, or, as a first turn, an id that no turn had. Programs that
begin with equal prompts are among them. `--api completions` sends the same texts as one prompt, `--api responses` as
items. CPU time of this thread, with the hashing of all messages of the request.
"""

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import save
from cluster.core.lineage import MAX_POINTS, Attributed, LineageIndex
from cluster.core.program import ProgramIdentity

TARGET_RIGHT = 0.99
TARGET_MS = 0.2
"""Bound on the mean CPU time of a request."""
DATA = Path(os.environ.get("CAESURA_DATA", "../shared/data")) / "text"
SYSTEM = {"role": "system", "content": "You are an agent. " * 200}
NOBODY = ProgramIdentity()


@dataclass(slots=True)
class Recorded:
    """A recorded program and how much of it was sent."""

    name: str
    turns: list[tuple[str, str]]
    """The prompt and the answer of each turn."""
    sent: int = 0
    flying: Attributed | None = None
    messages: list[dict[str, Any]] = field(default_factory=lambda: [SYSTEM])
    id: str | None = None


def request(api: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of a request with this conversation."""
    match api:
        case "completions":
            return {"model": "model", "prompt": "".join(message["content"] for message in messages)}
        case "responses":
            return {"model": "model", "input": messages}
        case _:
            return {"model": "model", "messages": messages}


def recorded(path: Path) -> list[Recorded]:
    """Read the programs of a file of texts."""
    programs: dict[str, Recorded] = {}
    with gzip.open(path, "rt") as lines:
        for turn in map(json.loads, lines):
            program = programs.setdefault(turn["program_id"], Recorded(turn["program_id"], []))
            program.turns.append((turn["prompt_text"], turn["output_text"]))
    return list(programs.values())


def filled(programs: int, api: str = "chat") -> LineageIndex:
    """Return an index that knows this many programs, by all points that it keeps of each."""
    index = LineageIndex(2 * programs)
    for number in range(programs):
        messages = [SYSTEM, {"role": "user", "content": f"Task {number}"}]
        for turn in range(MAX_POINTS):
            sent = index.attribute(NOBODY, request(api, messages))
            if sent.by_prompt is not None:
                sent.by_prompt.received(f"Answer {turn}", ())
            index.ended(sent)
            messages.append({"role": "assistant", "content": f"Answer {turn}"})
            messages.append({"role": "user", "content": "Next"})
    return index


def index_bytes(programs: int, api: str) -> float:
    """Return the memory of a program of the index (bytes)."""
    tracemalloc.start()
    try:
        index = filled(programs, api)
        return tracemalloc.get_traced_memory()[0] / len(index)
    finally:
        tracemalloc.stop()


@dataclass
class Replay:
    """Recorded programs sent to an index, some at a time."""

    index: LineageIndex
    concurrent: int
    api: str = "chat"
    seed: int = 7
    right: int = 0
    seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    how: Counter[str] = field(default_factory=Counter)
    _last: dict[str, str] = field(default_factory=dict)
    """The recorded program of the last turn with an id."""

    def run(self, programs: list[Recorded]) -> None:
        """Send all turns. A turn of a program comes after the answer of the one before."""
        order = random.Random(self.seed)
        waiting = order.sample(programs, len(programs))
        running: list[Recorded] = []
        while waiting or running:
            while waiting and len(running) < self.concurrent:
                running.append(waiting.pop())
            place = order.randrange(len(running))
            program = running[place]
            if program.flying is None:
                self._send(program)
                continue
            if program.flying.by_prompt is not None:
                program.flying.by_prompt.received(program.turns[program.sent - 1][1], ())
            self.index.ended(program.flying)
            program.flying = None
            program.messages.append({"role": "assistant", "content": program.turns[program.sent - 1][1]})
            if program.sent == len(program.turns):
                running.pop(place)

    def _send(self, program: Recorded) -> None:
        program.messages.append({"role": "user", "content": program.turns[program.sent][0]})
        body = request(self.api, program.messages)
        start = time.thread_time()
        program.flying = self.index.attribute(NOBODY, body)
        self.seconds.append(time.thread_time() - start)
        self.lengths.append(sum(len(message["content"]) for message in program.messages))
        found = str(program.flying.identity.program_id)
        before = self._last.get(found)
        self.right += before is None if program.sent == 0 else before == program.name and found == program.id
        self.how[program.flying.how] += 1
        self._last[found], program.id = program.name, found
        program.sent += 1


def rows(directory: Path, programs: int, concurrent: int, api: str) -> Iterator[dict[str, Any]]:
    """One for each file, and one for all of them together."""
    paths = sorted(directory.glob("*.jsonl.gz"))
    groups = [(path.name.removesuffix(".jsonl.gz"), [path]) for path in paths] + [("all", paths)]
    for name, files in groups:
        replay = Replay(filled(programs, api), concurrent, api)
        sent = [program for path in files for program in recorded(path)]
        replay.run(sent)
        replay.index.check_integrity()
        milliseconds = [one * 1e3 for one in replay.seconds]
        yield {
            "text": name,
            "programs": len(sent),
            "others": programs,
            "turns": len(milliseconds),
            "right": round(replay.right / len(milliseconds), 5),
            "equal_first_prompts": len(sent) - len({program.turns[0][0] for program in sent}),
            "mean_characters": round(statistics.mean(replay.lengths)),
            "mean_ms": round(statistics.mean(milliseconds), 4),
            "p50_ms": round(statistics.median(milliseconds), 4),
            "p99_ms": round(statistics.quantiles(milliseconds, n=100)[98], 4),
            **{how: replay.how[how] for how in sorted(replay.how)},
        }


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 where a target is missed or there is no data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--api", choices=("chat", "completions", "responses"), default="chat")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    if not any(arguments.data.glob("*.jsonl.gz")):
        print(f"no recorded texts in {arguments.data}", file=sys.stderr)
        return 1
    found = []
    for row in rows(arguments.data, arguments.programs, arguments.concurrent, arguments.api):
        print(
            f"  {row['text']:22} {row['programs']:4} programs {row['turns']:6} turns   {row['right']:8.3%} right   "
            f"{row['mean_characters']:7} characters   mean {row['mean_ms']:.3f} ms   p99 {row['p99_ms']:.3f} ms"
        )
        found.append(row)
    found.append({"text": "memory", "program_bytes": round(index_bytes(1000, arguments.api))})
    print(f"  memory of a program of the index: {found[-1]['program_bytes']} bytes")
    save("lineage" if arguments.api == "chat" else f"lineage_{arguments.api}", found, arguments.json)
    everything = found[-2]
    return 0 if everything["right"] >= TARGET_RIGHT and everything["mean_ms"] <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
