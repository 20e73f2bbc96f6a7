"""The router's settings: those that a user sets, and the constants of the engine beside them."""

from typing import Annotated

from pydantic import Field, field_validator

from cluster.config.sections import Section
from cluster.core.registry import FILTERS, SCORERS

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class RouterSettings(Section):
    """How programs are placed, migrated and admitted: `router.parameters` where the router is `caesura`."""

    filters: tuple[str, ...] = tuple(FILTERS)
    """Names of the registered filters that a replica has to pass."""
    scorers: dict[str, Factor] = Field(default_factory=lambda: dict.fromkeys(SCORERS, 1.0))
    """Names of the registered scorers, each with the weight of the seconds that it estimates."""
    max_moves: int = Field(3, ge=0)
    """How often a program may migrate to a less loaded replica. 0 keeps it on its first replica while that is there."""
    max_wait_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds that a program may wait for admission. One that would wait longer is rejected with 503."""
    max_waiting: int = Field(4096, ge=1)
    """Maximum number of turns that wait for admission in one ingress. Further turns are rejected with 503."""
    tenant_weights: dict[str, Weight] = Field(default_factory=dict)
    """Weight of each tenant in admissions while programs of several tenants wait. A tenant that is not named has
    weight 1."""
    max_programs: int = Field(100_000, ge=1)
    """Maximum number of programs whose home one ingress remembers. The store knows the homes of the others."""
    program_ttl_s: float = Field(3600.0, gt=0, allow_inf_nan=False)
    """Seconds without a turn after which a program is forgotten."""

    @field_validator("filters")
    @classmethod
    def _known_filters(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in FILTERS:
                raise ValueError(f"unknown filter {name!r}; choose from: {', '.join(FILTERS)}")
        return names

    @field_validator("scorers")
    @classmethod
    def _known_scorers(cls, weights: dict[str, float]) -> dict[str, float]:
        for name in weights:
            if name not in SCORERS:
                raise ValueError(f"unknown scorer {name!r}; choose from: {', '.join(SCORERS)}")
        return weights


class EngineSettings(RouterSettings):
    """The user's settings and the engine's constants.

    No key of the configuration sets a constant. The simulator (`--front`), benchmarks and tests may.
    """

    stale_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    """A replica without a new snapshot for this long counts as the median of the others: five missed publications."""
    suspect_s: float = Field(2.0, ge=0, allow_inf_nan=False)
    """New programs avoid a replica for this long after it has failed a turn: it may be dead before Ray reports it."""
    silent_s: float = Field(2.0, gt=0, allow_inf_nan=False)
    """New programs avoid a replica without a new snapshot for this long, if others have newer ones: its engine may be
    frozen. Replicas publish every second."""
    unconfirmed_snapshots: int = Field(2, ge=1, le=100)
    """What was sent to a replica counts beside its snapshots until so many newer ones have come. The first of them may
    have been taken before."""
    own_prefix_blocks: int = Field(1024, ge=0, le=1_000_000)
    """Prefix blocks sent last that are remembered of each replica: as many as a snapshot names (`MAX_PREFIXES`)."""

    hysteresis: float = Field(1.0, ge=0, allow_inf_nan=False)
    """A program migrates if the gain exceeds so many times what the migration costs: 1 breaks even."""
    move_gain_s: float = Field(0.5, ge=0, allow_inf_nan=False)
    """And so many seconds: below this, differences between replicas are chance."""
    move_margin: Share = 0.6
    """And this part of what the program loses at home, since today's difference does not last for all of its life. At
    0.3 goodput fell from 0.363 to 0.338 (benchmarks/README.md, the routers' comparison)."""

    working_set: float = Field(0.9, gt=0, le=10)
    """Programs are admitted to a replica until their expected KV is so many times its memory. Below 1, since a policy
    that does not protect its memory thrashes beyond 1; the tenth is chosen, not measured."""
    guarded_working_set: float = Field(3.0, gt=0, le=10)
    """The same of a replica whose policy protects its memory, as `caesura` does. At 1, programs waited 183 s for
    admission and completed in 224 s instead of 123 (benchmarks/README.md)."""
    host_share: Share = 0.5
    """Part of the host tier that counts as memory in this, since a fetch is not free. Chosen, not measured."""
    empty_share: Share = 0.25
    """A program larger than a replica's bound is admitted where no more than this part of the bound is taken. Chosen,
    not measured."""
    aged_share: float = Field(0.125, gt=0, le=1)
    """Part of a tenant's admissions that goes to its oldest waiter, whatever its work: every eighth, against starvation
    under the least-work-first order. Chosen, not measured."""
    tenant_spread: float = Field(1.0, gt=0, le=1)
    """Part of the replicas on which one tenant's programs may live. 1 does not isolate tenants."""

    @classmethod
    def of(cls, settings: RouterSettings) -> "EngineSettings":
        """The user's settings, with the default constants unless they come with others."""
        return settings if isinstance(settings, cls) else cls.model_validate(settings.model_dump())
