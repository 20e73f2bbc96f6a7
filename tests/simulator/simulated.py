"""Programs, and virtual replicas whose steps take times that can be worked out by hand."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.registry import PEERS
from cluster.core.slo import ProgramRecord
from cluster.offline.bench.runner import Job
from cluster.offline.bench.workload import PlannedProgram, PlannedTurn
from cluster.offline.simulator.foresight import Foresight
from cluster.offline.simulator.routing import LeastPrograms, TurnRouter
from cluster.offline.simulator.settings import BASELINES, STOCK_NO_CACHE, WITHOUT_HOST_TIER
from cluster.offline.simulator.simulation import Simulation
from replicas.cost_model import CostModel
from replicas.peers.peer import Peer
from replicas.virtual_disk import VirtualDisk
from replicas.virtual_engine import Shape
from replicas.virtual_replica import VirtualReplica

LIVE = Foresight()
"""What live clients tell."""

COST = CostModel(
    name="by hand",
    kv_bytes_per_token=1 << 20,
    kv_capacity_tokens=4096,
    overhead_s=0.001,
    sequence_s=0.0002,
    weights_s=0.005,
    token_s=0.0001,
    context_s=2e-6,
    pair_s=1e-7,
    swap_token_s=1e-5,
)


def turn(fresh: int, output: int, tool: str | None = None, pause_s: float = 0.0) -> PlannedTurn:
    return PlannedTurn(fresh_tokens=fresh, output_tokens=output, kept_tokens=output, tool=tool, pause_s=pause_s)


def program(*turns: PlannedTurn, prefix: tuple[str, int] | None = None) -> PlannedProgram:
    group, tokens = prefix or (None, 0)
    return PlannedProgram("recorded", "", turns, group, tokens)


class Bench:
    """Simulates jobs and keeps what is left: the replicas and the clock."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.clock = ManualClock()
        self.replicas: list[VirtualReplica] = []
        self.simulation: Simulation
        self.router: TurnRouter

    def prepare(
        self,
        programs: Sequence[tuple[float, PlannedProgram]],
        policy: str | PolicyConfig = "vllm",
        replicas: int = 1,
        foresight: Foresight = LIVE,
        cost: CostModel = COST,
        router: Callable[[Sequence[VirtualReplica]], TurnRouter] = lambda replicas: LeastPrograms(len(replicas)),
        disk: Callable[[int, ManualClock], VirtualDisk] | None = None,
        **shape: int,
    ) -> Simulation:
        self.clock = ManualClock()
        config: PolicyConfig | Peer | None = None
        if isinstance(policy, PolicyConfig):
            config = policy
        elif policy in PEERS:
            config = PEERS.load(policy)().build(cost)
        elif policy not in BASELINES:
            config = PolicyConfig(name=policy)
        if isinstance(policy, str) and policy in WITHOUT_HOST_TIER:
            shape["host_blocks"] = 0
        made = Shape(**{"num_blocks": 257, "max_num_seqs": 64, **shape}, prefix_caching=policy != STOCK_NO_CACHE)
        slo = SloConfig(ttft_s=1.0, normalized_latency_s=0.1)
        disks = [disk(index, self.clock) if disk is not None else None for index in range(replicas)]
        self.replicas = [
            VirtualReplica.build(config, cost, slo, made, self.model, self.clock, drive) for drive in disks
        ]
        jobs = [Job(f"p{n}", planned, at_s, (0, 0, n)) for n, (at_s, planned) in enumerate(programs)]
        return self.simulate(jobs, router, foresight=foresight)

    def simulate(
        self,
        jobs: Sequence[Job],
        router: Callable[[Sequence[VirtualReplica]], TurnRouter],
        successors: Iterator[Job] | None = None,
        foresight: Foresight = LIVE,
    ) -> Simulation:
        """On the replicas that were prepared."""
        self.router = router(self.replicas)
        self.simulation = Simulation(jobs, self.replicas, self.clock, foresight, self.router, successors)
        return self.simulation

    def run(self, *programs: tuple[float, PlannedProgram], until_s: float = 1e6, **how: object) -> list[ProgramRecord]:
        return self.prepare(programs, **how).run(until_s)  # type: ignore[arg-type]
