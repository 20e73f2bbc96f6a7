"""The totals and the state of a disk tier, as the scheduler's snapshot has them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from replicas.disk_tier.trouble import Direction, Trouble
from replicas.disk_tier.value import WriteOutcome


@dataclass(frozen=True, slots=True)
class DiskNumbers:
    """Totals since the start, and gauges. Without arguments they are those of a replica without a disk tier."""

    tokens: int = 0
    """Capacity of the replica's slot."""
    used_tokens: int = 0
    bytes: Mapping[Direction, int] = field(default_factory=dict)
    seconds: Mapping[Direction, float] = field(default_factory=dict)
    troubles: Mapping[Trouble, int] = field(default_factory=dict)
    degraded: Collection[Trouble] = ()
    """What is wrong now."""
    writes: Mapping[WriteOutcome, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with a number for each name."""
        return {
            "disk_tokens": self.tokens,
            "disk_used_tokens": self.used_tokens,
            "disk_bytes": _all(Direction, self.bytes),
            "disk_seconds": _all(Direction, self.seconds),
            "disk_troubles": _all(Trouble, self.troubles),
            "disk_degraded": _all(Trouble, dict.fromkeys(self.degraded, 1)),
            "disk_writes": _all(WriteOutcome, self.writes),
        }


def _all(names: type[StrEnum], values: Mapping[Any, float]) -> dict[str, float]:
    return {name.value: values.get(name, 0) for name in names}
