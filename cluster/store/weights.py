"""The weights that all replicas of a model should have, in Redis, and whether they should generate.

Replicas follow this value, so that one that starts later has the same weights as the others.
"""

from dataclasses import dataclass
from typing import Any

from cluster.core.clock import Clock
from cluster.core.errors import BadRequest
from cluster.core.turn_tokens import INITIAL_WEIGHTS
from cluster.store.client import RedisStore, key_space


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """The weights that the replicas of a model should have."""

    version: str = INITIAL_WEIGHTS
    path: str | None = None
    """The folder of the weights. None: the model's own."""
    paused: bool = False
    """Whether the replicas wait before they generate more."""


def refused_with_store(kv_store: str) -> BadRequest:
    """Return the refusal of other weights for a model with a KV store of another project.

    Its keys do not depend on the weights, or nobody has shown that they do for all of its copies.
    """
    return BadRequest(
        f"model: its weights cannot be changed, because it has replicas.kv_store ({kv_store}), which may load KV of the"
        " old weights",
        param="model",
    )


class WeightsStore(RedisStore):
    """Access to the target of one model.

    Every call ends within about ``timeout_s``, and raises `StoreUnavailable` if it failed.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        model: the model's id.
        timeout_s: timeout of each call in seconds.
        clock: measures how long the store was unavailable.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, *, model: str, timeout_s: float, clock: Clock) -> None:
        super().__init__(
            url,
            name="the store of weights",
            degraded="changes of the weights are not seen",
            timeout_s=timeout_s,
            clock=clock,
            connections=1,
        )
        self._key = f"{key_space(model)}:weights"

    async def read(self) -> WeightsTarget:
        """Return the target. Without one it is the weights of the configuration."""
        async with self.request():
            found: list[Any] = await self.redis.hmget(self._key, ["version", "path", "paused"])
        version, path, paused = (None if value is None else bytes(value).decode() for value in found)
        return WeightsTarget(version or INITIAL_WEIGHTS, path, paused == "1")

    async def set_weights(self, version: str, path: str) -> None:
        """Set the weights of the target."""
        async with self.request():
            await self.redis.hset(self._key, mapping={"version": version, "path": path})

    async def set_paused(self, paused: bool) -> None:
        """Set whether the replicas should wait."""
        async with self.request():
            await self.redis.hset(self._key, "paused", "1" if paused else "0")
