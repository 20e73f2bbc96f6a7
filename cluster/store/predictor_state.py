"""The learnt state of predictors, shared through Redis. Each writer's part is one value."""

from collections.abc import Mapping

from cluster.core.clock import Clock
from cluster.store.client import StoreFailure, key_space
from cluster.store.parts import PartLimits, SharedParts

MAX_PART_BYTES = 8 << 20
LIMITS = PartLimits(writers=64, fields=16, value_bytes=MAX_PART_BYTES, read_bytes=32 << 20)

_FIELD = b"part"


class PredictorStateStore(SharedParts):
    """One writer's access to the learnt state of all writers of one ``space``."""

    def __init__(self, url: str, *, space: str, writer: str, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        super().__init__(
            url,
            writers=f"{key_space(space)}:learners",
            prefix=f"{key_space(space)}:learnt:",
            writer=writer,
            limits=LIMITS,
            expiry_s=expiry_s,
            name="the store of what predictors learn",
            degraded="forecasts go on without the store",
            timeout_s=timeout_s,
            clock=clock,
        )

    async def exchange(self, own: bytes | None) -> Mapping[str, bytes] | None:
        """Write this writer's state and read the others'. Only one call may be in progress at a time.

        Args:
            own: this writer's complete state; None: it has learnt nothing. It is written only if it has changed.

        Returns:
            The state of the others, by writer; None: the exchange failed, within about ``timeout_s``. ``failures`` has
            counted the reason.
        """
        if own is not None and len(own) > MAX_PART_BYTES:
            self.failures[StoreFailure.CORRUPT] += 1
            own = None
        parts = await self.exchange_parts(None if own is None else {_FIELD: own})
        if parts is None:
            return None
        return {name.decode("utf-8", "replace"): part[_FIELD] for name, part in parts.items() if _FIELD in part}
