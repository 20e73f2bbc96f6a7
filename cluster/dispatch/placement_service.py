"""The placement of one model's programs in one ingress process: engine, store, snapshots, metrics."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.supervision import SupervisedTasks
from cluster.dispatch.quarantine import Quarantine
from cluster.observing.meter import Meter
from cluster.observing.recorders import RouterMetrics
from cluster.store.placements import PlacementStore
from router.cold_start import ColdStart
from router.decisions import Placed, Refused
from router.placement import Fallback, Placer, SessionPlacer
from router.placement_engine import PlacementEngine
from router.program_placer import ProgramPlacer
from router.settings import RouterSettings
from router.snapshots import HUB

logger = logging.getLogger("ray.serve")

METRICS_PERIOD_S = 1.0
"""Seconds between two recordings. Ray drops gauges that are not set about this often."""
DEMAND_PERIOD_S = 1.0
"""Seconds between two reports of the demand to the autoscaler."""
DEMAND_TIMEOUT_S = 2.0
"""A replica that does not take a report within this time has failed. Replicas drop reports after 5 s, so that the next
report has to reach another one before."""
DEMAND_AVOID_S = 30.0
"""A replica that has failed to take a report gets none for this long, if there are others."""

TurnCounts = Callable[[], tuple[int, int]]
"""Returns the number of turns that have ended, and of those that missed their SLO."""


class PlacementService:
    """Makes, opens and closes the parts.

    Args:
        replicas: a handle to the `ProgramServer`s of a model.
        config: the whole configuration, for that model.
        clock: the clock of the router.
        name: the name of this ingress process.
        counts: counts the turns of this model, for the autoscaler.
    """

    def __init__(
        self, replicas: DeploymentHandle, config: CaesuraConfig, clock: Clock, name: str, counts: TurnCounts
    ) -> None:
        self._name = name
        self._clock = clock
        self._counts = counts
        self._is_elastic, self._least = config.replicas.is_elastic, config.replicas.least
        self._tasks = SupervisedTasks(f"the placement of {config.model.id}", clock)
        self._deployment = replicas.deployment_name
        self._calls = replicas.options(stream=False)
        self._program_placer: ProgramPlacer | None = None
        self._store: PlacementStore | None = None
        self.placer: Placer = SessionPlacer(config.router.name)
        self.quarantine = Quarantine(clock, config.router.quarantine_s)
        if (settings := config.placement) is not None:
            self.placer = self._program_placer = self._make_placer(config, settings, clock)
        self._metrics = RouterMetrics(Meter({"model": config.model.id}, enabled=config.metrics.enabled))
        self._unsubscribe: Callable[[], None] | None = None

    def _make_placer(self, config: CaesuraConfig, settings: RouterSettings, clock: Clock) -> ProgramPlacer:
        idle_s = settings.program_ttl_s
        self._store = store = PlacementStore(
            config.redis.url, model=config.model.id, timeout_s=config.redis.timeout_s, expiry_s=idle_s, clock=clock
        )
        self.quarantine = Quarantine(clock, config.router.quarantine_s, store)
        replicas = config.replicas
        cold_start = ColdStart(
            self._wake,
            clock,
            self._tasks,
            limit_s=min(settings.max_wait_s, replicas.start_timeout_s),
            max_waiting=settings.max_waiting,
        )
        return ProgramPlacer(
            PlacementEngine(
                settings,
                config.slo,
                config.model.id,
                {tenant: config.slo_of(tenant) for tenant in config.tenants},
            ),
            store,
            clock,
            tasks=self._tasks,
            moved_away=self._moved_away,
            idle_s=idle_s,
            max_programs=settings.max_programs,
            cold_start=cold_start if replicas.least == 0 else None,
        )

    @property
    def ours(self) -> bool:
        """Whether this ingress places programs. Otherwise Ray's own router places them by their keys."""
        return self._program_placer is not None

    @property
    def failed(self) -> tuple[str, ...]:
        """Background loops that keep failing; see `SupervisedTasks.failed`."""
        return self._tasks.failed

    async def _moved_away(self, replica: str, key: str, epoch: int) -> None:
        await self._calls.options(session_id=replica).moved_away.remote(key, epoch)

    async def _wake(self) -> None:
        # A call that names no replica waits in Ray Serve, whose controller then starts the first replica.
        await self._calls.ready.remote()

    async def _report_demand(self, placer: ProgramPlacer) -> None:
        failed: dict[str, float] = {}
        while True:
            await asyncio.sleep(DEMAND_PERIOD_S)
            now_s = self._clock.now_s()
            failed = {one: until_s for one, until_s in failed.items() if until_s > now_s}
            if (replica := placer.replicas.first(failed)) is not None:
                if replica in failed:
                    failed.clear()  # all have failed: they are tried in turn again
                demand = placer.demand(*self._counts()).numbers()
                try:
                    async with asyncio.timeout(DEMAND_TIMEOUT_S):
                        await self._calls.options(session_id=replica).demand.remote(self._name, demand)
                except Exception as error:  # noqa: BLE001 - the next report follows, to another replica
                    failed[replica] = self._clock.now_s() + DEMAND_AVOID_S
                    logger.info("replica %s did not take the demand: %r", replica, error)

    def open(self) -> None:
        """Subscribe to the replicas' snapshots, and start the background loops."""
        self._tasks.start("record metrics", self._record_metrics)
        if (placer := self._program_placer) is not None:
            self._unsubscribe = HUB.subscribe(self._deployment, placer.observe)
            self._tasks.start("attend", placer.attend)
            self._tasks.start("follow the quarantine", self.quarantine.follow)
            if self._is_elastic:
                self._tasks.start("report demand", lambda: self._report_demand(placer))

    def view(self) -> dict[str, Any]:
        """Return the placement by this ingress, for operators."""
        tasks = {"failures": dict(self._tasks.failures), "failed": list(self._tasks.failed)}
        return {**self.placer.view(), "unreadable_snapshots": HUB.unreadable, "background": tasks}

    async def aclose(self) -> None:
        """Stop. Programs keep their homes."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._tasks.aclose()
        if self._program_placer is not None:
            await self._program_placer.aclose()

    async def _record_metrics(self) -> None:
        while True:
            self._metrics.record_min(self._least)
            if (placer := self._program_placer) is not None:
                self._metrics.record(
                    waiting=placer.waiting,
                    waits_s=placer.take_waits_s(),
                    ages_s=[age_s for age_s in placer.replicas.ages_s().values() if age_s is not None],
                    states=placer.replicas.states(),
                    moves=placer.moves,
                    placements={reason: placer.placements[reason] for reason in Placed},
                    refusals={reason: placer.refusals[reason] for reason in Refused},
                    fallbacks={kind: placer.fallbacks[kind] for kind in Fallback},
                )
            if self._store is not None:
                self._metrics.record_store(self._store.failures, up=self._store.healthy)
            await asyncio.sleep(METRICS_PERIOD_S)
