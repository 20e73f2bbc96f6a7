"""What the routers' comparison compares, and on which recordings."""

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.offline.simulator.routers import EVERYWHERE, OURS
from cluster.offline.simulator.settings import STOCK, SimulationSettings

PEERS = ("consistent_hash", "kv_aware", "prefix_affinity", "power_of_two")
BEST_PEERS = ("consistent_hash", "kv_aware")
"""Also before our scheduler: what a router alone is worth."""
HOST_GIB = 100.0
"""Of each replica, where there is a host tier."""
MAX_ONGOING = {"consistent_hash": 96}
"""Tuned: below it programs are torn from their home at usual loads, far above it nothing is ever shed."""
NO_ADMISSION = {"working_set": 10.0, "guarded_working_set": 10.0}
"""The most that can be set: ten times what memory takes."""


RECORDINGS = Path(__file__).parents[1] / "../shared/data/programs"


@dataclass(frozen=True, slots=True)
class Scene:
    """What is replayed, and at which loads, in programs per second and replica."""

    trace: Path | None
    cliff_trace: Path | None
    preset: str
    max_context: int | None
    rate: float
    """Where the best peer's completion has doubled, as ``--scan`` found it."""
    scan: tuple[float, ...]
    """The first one is the low load."""
    minutes: float
    """Measured; programs that take half an hour, with their pauses, need some."""
    warmup_minutes: float


RECORDED = Scene(
    RECORDINGS / "kvtester_cc.jsonl.gz",
    RECORDINGS / "iso_bench_trae.jsonl.gz",
    "llama-3.1-8b/h100",
    65_536,
    rate=0.05,
    scan=(0.02, 0.04, 0.045, 0.05),
    minutes=20.0,
    warmup_minutes=10.0,
)
BUILT_IN = Scene(None, None, "opt-13b/h800", None, rate=2.0, scan=(0.5, 1.5, 2.0, 2.5), minutes=6.0, warmup_minutes=4.0)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared."""

    router: str
    policy: str
    front: tuple[tuple[str, float], ...] = ()
    host_gib: float = 0.0

    @property
    def is_peer(self) -> bool:
        """As it comes, before vLLM's own scheduler, with the memory that we have: to be beaten, and not only shown."""
        return self.router in PEERS and self.policy == STOCK and not self.host_gib

    @property
    def is_router_alone(self) -> bool:
        """Another router before our scheduler, which does not come with it."""
        return self.router in PEERS and self.policy != STOCK

    @property
    def shown_policy(self) -> str:
        """With its memory."""
        return f"{self.policy}+host" if self.host_gib else self.policy

    @property
    def name(self) -> str:
        """For plots."""
        return f"{self.router}, {'no admission, ' if self.front else ''}{self.policy}"

    def settings(self, base: SimulationSettings, rate_per_s: float) -> SimulationSettings:
        """For a run of its own."""
        return replace(
            base,
            policies=(self.policy,),
            routers=(self.router,),
            rates_per_s=(rate_per_s,),
            max_ongoing=MAX_ONGOING.get(self.router),
            front=dict(self.front),
            host_gib=self.host_gib,
        )


OURSELVES = Subject(OURS, "caesura")
COMPARED = (
    OURSELVES,
    *(Subject(router, STOCK) for router in PEERS),
    *(Subject(router, "caesura") for router in BEST_PEERS),
    Subject(OURS, "caesura", host_gib=HOST_GIB),
    Subject("consistent_hash", STOCK, host_gib=HOST_GIB),
)
BOUND = Subject(EVERYWHERE, "caesura")
AMPLE = 20.0
"""Times the device's memory for KV of which nothing is lost in minutes."""
CLIMBERS = (
    OURSELVES,
    Subject(OURS, "caesura", tuple(NO_ADMISSION.items())),
    Subject("consistent_hash", STOCK),
)
