"""Where the programs of one model live, put together for one ingress process: `Front`, store, board and metrics."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.observing.meter import Meter
from cluster.observing.router import RouterMetrics
from cluster.placement_store import PlacementStore
from cluster.quarantine import Quarantine
from router.board import BOARD
from router.decisions import Placed, Refused
from router.front import ProgramFront
from router.placer import Placer
from router.places import Fallback, KeyedPlaces, Places
from router.settings import FrontSettings

METRICS_PERIOD_S = 1.0
"""Gauges go stale in Ray unless they are set about so often."""


class Placing:
    """The parts, and their beginning and end.

    Args:
        replicas: a handle to the `ProgramServer`s of a model.
        config: the whole configuration, as that model sees it.
        clock: all of the router's time.
        name: of this ingress process.
    """

    def __init__(self, replicas: DeploymentHandle, config: CaesuraConfig, clock: Clock, name: str) -> None:
        self._name = name
        self._deployment = replicas.deployment_name
        self._calls = replicas.options(stream=False)
        self._placer: Placer | None = None
        self._store: PlacementStore | None = None
        self.places: Places = KeyedPlaces(config.router.name)
        self.quarantine = Quarantine(clock, config.router.quarantine_s)
        if (settings := config.placement) is not None:
            self.places = self._placer = self._ours(config, settings, clock)
        self._metrics = RouterMetrics(Meter({"model": config.model.id}, enabled=config.metrics.enabled))
        self._regular: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None

    def _ours(self, config: CaesuraConfig, settings: FrontSettings, clock: Clock) -> Placer:
        idle_s, most = settings.idle_program_s, settings.max_programs
        self._store = store = PlacementStore(
            config.store.url, model=config.model.id, timeout_s=config.store.timeout_s, expiry_s=idle_s, clock=clock
        )
        self.quarantine = Quarantine(clock, config.router.quarantine_s, store)
        front = ProgramFront(settings, config.slo, config.model.id)
        return Placer(front, store, clock, moved_away=self._moved_away, idle_s=idle_s, max_programs=most)

    @property
    def ours(self) -> bool:
        """Whether programs are placed; else they go where Ray's own router sends their keys."""
        return self._placer is not None

    async def _moved_away(self, replica: str, key: str, epoch: int) -> None:
        await self._calls.options(session_id=replica).moved_away.remote(key, epoch)

    def open(self) -> None:
        """Begin to look at the replicas."""
        if self._placer is not None:
            self._unsubscribe = BOARD.subscribe(self._deployment, self._placer.observe)
            self._regular = [
                asyncio.create_task(self._placer.attend()),
                asyncio.create_task(self._count_for_ever(self._placer)),
            ]

    def view(self) -> dict[str, Any]:
        """For operators: this ingress's part."""
        return {**self.places.view(), "unreadable_snapshots": BOARD.junk}

    async def aclose(self) -> None:
        """Stop; programs stay where they are."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        for task in self._regular:
            task.cancel()
        if self._placer is not None:
            await self._placer.aclose()

    async def _count_for_ever(self, placer: Placer) -> None:
        while True:
            self._metrics.record(
                waiting=placer.waiting,
                waits_s=placer.take_waits_s(),
                ages_s=[age_s for age_s in placer.sightings.ages_s().values() if age_s is not None],
                states=placer.sightings.states(),
                moves=placer.moves,
                placements={reason: placer.placements[reason] for reason in Placed},
                refusals={reason: placer.refusals[reason] for reason in Refused},
                fallbacks={kind: placer.fallbacks[kind] for kind in Fallback},
            )
            if self._store is not None:
                self._metrics.record_store(self._store.failures, up=self._store.healthy)
            await asyncio.sleep(METRICS_PERIOD_S)
