"""What a decision of the router's core costs.

    python -m benchmarks.router_decisions [--replicas 64] [--programs 10000] [--decisions 5000]

That many programs live on that many replicas, whose snapshots name them, their KV and the prefix blocks they share.
Measured are a new program's first turn, a resumed program's next turn, the same two while programs wait at the front,
and taking in a new snapshot of every replica, as once a second. CPU time of this thread, which waits for nothing, since
others may use the machine meanwhile; the collector of garbage is on.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import save
from cluster.config.schema import SloConfig
from cluster.core.replica_snapshot import (
    MAX_PREFIX_BLOCKS,
    MAX_PREFIXES,
    ReplicaSnapshot,
    StepCosts,
    pack_blocks,
    pack_names,
    prefix_blocks,
)
from router.decisions import Go, TurnRequest
from router.placement_engine import PlacementEngine
from router.settings import RouterSettings

TARGET_MS = 0.3
"""The p99 of a decision."""
TENANTS, SYSTEM_PROMPTS = 8, 32
CONTEXT = 6_000
"""Tokens of a program's KV in the mean."""
COSTS = StepCosts(1.5e-3, 1e-5, 6e-3, 2.9e-5, 4.9e-8, 2.6e-6)


@dataclass
class Site:
    """A front and the replicas that it sees."""

    replicas: int
    programs: int
    full: bool
    """No replica has room for another program."""
    front: PlacementEngine = field(init=False)
    now_s: float = 0.0
    number: int = 0
    turns: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    homes: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(7)
        self.front = PlacementEngine(RouterSettings(), SloConfig())
        self.systems = [prefix_blocks(self._tokens(8192)) for _ in range(SYSTEM_PROMPTS)]
        self.kv_tokens = 4 * self.programs // self.replicas * CONTEXT
        self.observe(self.snapshots(full=False))
        for number in range(self.programs):
            request = self.request(f"tenant{number % TENANTS}/program{number}")
            decision = self.front.turn(self._turn_id(), request, self.now_s)
            assert isinstance(decision, Go), decision
            self.homes.setdefault(decision.home.replica, []).append(request.key)
            self.front.ended(f"turn{self.turns}", self.now_s, context_tokens=CONTEXT)
        for _ in range(3):
            self.observe(self.snapshots(full=self.full))

    def request(self, key: str) -> TurnRequest:
        """A turn of 8192 tokens that begins as one of some system prompts does, and goes on by itself."""
        shared = self.random.choice(self.systems)[: MAX_PREFIX_BLOCKS // 2]
        own = tuple(self.random.getrandbits(64) for _ in range(MAX_PREFIX_BLOCKS // 2))
        return TurnRequest(key, key.partition("/")[0], self.random.randrange(1000, 12_000), prefix=shared + own)

    def snapshots(self, full: bool) -> dict[str, ReplicaSnapshot | None]:
        """Of every replica, a newer one."""
        self.number += 1
        return {f"replica{i:03}": self._snapshot(f"replica{i:03}", full) for i in range(self.replicas)}

    def observe(self, snapshots: dict[str, ReplicaSnapshot | None]) -> None:
        """As the ingress does: the bytes are parsed, too."""
        packed = {replica: one.encode() for replica, one in snapshots.items() if one is not None}
        self.now_s += 1.0
        self._timed(
            "observe",
            lambda: self.front.observe(
                {replica: ReplicaSnapshot.decode(one) for replica, one in packed.items()}, self.now_s
            ),
        )

    def new(self) -> None:
        """A program's first turn; it ends at once, and the program with it."""
        key = f"tenant{self.random.randrange(TENANTS)}/new{self.turns}"
        request, turn_id = self.request(key), self._turn_id()
        self._timed("new", lambda: self.front.turn(turn_id, request, self.now_s))
        if not self.full:
            self._timed("ended", lambda: self.front.ended(turn_id, self.now_s))
            self.front.forget(key, self.now_s)

    def resumed(self) -> None:
        """A living program's next turn."""
        number = self.random.randrange(self.programs)
        key = f"tenant{number % TENANTS}/program{number}"
        request, turn_id = self.request(key), self._turn_id()
        self._timed("resumed", lambda: self.front.turn(turn_id, request, self.now_s))
        self.front.ended(turn_id, self.now_s, context_tokens=CONTEXT)

    def admitted(self) -> None:
        """A look at who waits."""
        self._timed("admitted", lambda: self.front.admitted(self.now_s))

    def _timed(self, name: str, call: Callable[[], object]) -> None:
        start = time.thread_time()
        call()
        self.seconds.setdefault(name, []).append(time.thread_time() - start)

    def _turn_id(self) -> str:
        self.turns += 1
        return f"turn{self.turns}"

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(50_000) for _ in range(count)]

    def _snapshot(self, replica: str, full: bool) -> ReplicaSnapshot:
        mine = self.homes.get(replica, [])
        blocks = [block for system in self.systems[: MAX_PREFIXES // MAX_PREFIX_BLOCKS] for block in system]
        running, paused = len(mine) // 4, len(mine) - len(mine) // 4
        return ReplicaSnapshot(
            replica=replica,
            model="model",
            number=self.number,
            draining=False,
            costs=COSTS,
            kv_tokens=self.kv_tokens,
            free_tokens=self.kv_tokens // 3,
            held_tokens=paused * CONTEXT // 2,
            host_tokens=0,
            host_used_tokens=0,
            running=running,
            waiting=self.random.randrange(4),
            running_tokens=running * CONTEXT,
            waiting_tokens=self.random.randrange(20_000),
            output_tokens=running * 100.0,
            programs=len(mine),
            working_set_tokens=float(self.kv_tokens if full else len(mine) * CONTEXT),
            working_set_programs=float(len(mine)),
            resume_tokens=tuple((2.0**i, self.random.randrange(10_000) * 1.0) for i in range(8)),
            turn_output_tokens=200.0,
            turn_new_tokens=600.0,
            program_turns=12.0,
            pause_s=4.0,
            residents=pack_names(mine),
            on_device=pack_names(mine[: len(mine) // 2]),
            prefixes=pack_blocks(blocks),
        )


def rows_of(site: Site) -> Iterator[dict[str, Any]]:
    """One for each kind of call."""
    for name, seconds in site.seconds.items():
        milliseconds = [one * 1e3 for one in seconds]
        yield {
            "call": name,
            "replicas": site.replicas,
            "programs": site.programs,
            "waiting": site.front.waiting,
            "calls": len(seconds),
            "p50_ms": round(statistics.median(milliseconds), 4),
            "p99_ms": round(statistics.quantiles(milliseconds, n=100)[98], 4),
            "max_ms": round(max(milliseconds), 4),
        }


def measure(replicas: int, programs: int, decisions: int, *, full: bool) -> Site:
    """A site after so many decisions, snapshots in between as of a busy second."""
    site = Site(replicas, programs, full)
    site.seconds.clear()
    for number in range(decisions):
        if number % 50 == 0:
            site.observe(site.snapshots(full))
        if full and number % 50 == 25:
            site.admitted()
        site.new() if number % 2 else site.resumed()
    site.front.check_integrity()
    return site


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 where a decision's p99 misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--decisions", type=int, default=5_000)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    rows = []
    for full in (False, True):
        site = measure(arguments.replicas, arguments.programs, arguments.decisions, full=full)
        rows += [{"full": full, **row} for row in rows_of(site)]
    print(f"decisions at {arguments.replicas} replicas and {arguments.programs} programs")
    for row in rows:
        print(
            f"  {'full' if row['full'] else 'room':4} {row['call']:9} {row['calls']:6} calls   "
            f"p50 {row['p50_ms']:7.3f} ms   p99 {row['p99_ms']:7.3f} ms   max {row['max_ms']:7.3f} ms   "
            f"{row['waiting']} waiting"
        )
    save("router_decisions", rows, arguments.json)
    return 1 if any(row["call"] in ("new", "resumed") and row["p99_ms"] > TARGET_MS for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
