"""When a turn counts as good: for all, for a model, for a tenant. What the nearest says of a bound counts."""

from pydantic import Field

from cluster.config_section import Section as _Section
from cluster.goodput import Slo


class SloConfig(_Section):
    """When a turn counts as good. null: that bound does not apply."""

    ttft_s: float | None = Field(1.0, gt=0)
    """Seconds from the intended arrival to the first token."""
    tpot_s: float | None = Field(None, gt=0)
    """Mean seconds between tokens after the first."""
    e2e_s: float | None = Field(None, gt=0)
    """Seconds from the intended arrival to the last token."""
    normalized_latency_s: float | None = Field(None, gt=0)
    """Seconds from arrival to the last token divided by the tokens generated."""

    @property
    def bounds(self) -> Slo:
        """As records are judged by."""
        return Slo(self.ttft_s, self.tpot_s, self.e2e_s, self.normalized_latency_s)

    def over(self, wider: "SloConfig") -> "SloConfig":
        """These bounds where they are said, null included; else those of ``wider``."""
        return SloConfig(**wider.model_dump() | self.model_dump(exclude_unset=True))
