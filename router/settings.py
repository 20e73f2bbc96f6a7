"""What of the router's core can be set: `router.parameters` of the configuration, where the router is ours."""

from typing import Annotated

from pydantic import Field, field_validator

from cluster.config_section import Section
from cluster.registry import FILTERS, SCORERS

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class FrontSettings(Section):
    """How programs are placed, moved and admitted."""

    filters: tuple[str, ...] = tuple(FILTERS)
    """Registered filters that a replica has to pass."""
    scorers: dict[str, Factor] = Field(default_factory=lambda: dict.fromkeys(SCORERS, 1.0))
    """Registered scorers, each with the weight of its seconds."""
    stale_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    """A replica that has told nothing new for so long counts as the median of the others."""
    suspect_s: float = Field(2.0, ge=0, allow_inf_nan=False)
    """After it has failed a turn, new programs avoid a replica for so long."""
    ledger_snapshots: int = Field(2, ge=1, le=100)
    """What was sent to a replica counts beside its snapshots until so many newer ones have come: the first may have
    been taken before."""
    own_prefix_blocks: int = Field(1024, ge=0, le=1_000_000)
    """Prefix blocks, those sent last, that are remembered of each replica beside those it names."""

    hysteresis: float = Field(1.0, ge=0, allow_inf_nan=False)
    """A program moves for load if that wins more than so many times what the move costs."""
    move_gain_s: float = Field(0.5, ge=0, allow_inf_nan=False)
    """And more than so many seconds."""
    move_margin: Share = 0.6
    """And more than this part of what it loses at home: what differs today will not for the whole of its life."""
    max_moves: int = Field(3, ge=0)
    """No program moves for load more often."""

    working_set: float = Field(0.9, gt=0, le=10)
    """Programs are admitted to a replica until their expected KV is so many times what its memory takes."""
    guarded_working_set: float = Field(3.0, gt=0, le=10)
    """The same of a replica whose own policy keeps its memory from thrashing, as `caesura` does: there a program that
    waits at the front waits for less."""
    host_share: Share = 0.5
    """Part of the host tier that counts as memory in this."""
    empty_share: Share = 0.25
    """A program larger than all that is admitted to a replica of whose bound no more than this part is taken."""
    max_wait_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """No program waits for admission longer; what would have to is refused."""
    max_waiting: int = Field(4096, ge=1)
    """Turns that wait in one ingress."""
    aged_share: float = Field(0.125, gt=0, le=1)
    """Part of a tenant's admissions that goes to whoever of it has waited longest, whatever its work."""
    tenant_weights: dict[str, Weight] = Field(default_factory=dict)
    """Shares of the tenants in admissions while several wait; 1 for those not named."""
    tenant_spread: float = Field(1.0, gt=0, le=1)
    """Part of the replicas on which one tenant's programs may live."""

    hash_bound: float = Field(1.25, ge=1, le=100)
    """Where programs are placed by hash, no replica gets more than so many times the mean."""
    max_programs: int = Field(100_000, ge=1)
    """Programs whose home is remembered; the store knows the others."""
    idle_program_s: float = Field(3600.0, gt=0, allow_inf_nan=False)
    """A program without a turn for so long is forgotten."""

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
