"""The weights of a replica: their version, their update from a folder, and the pause of all generation.

An update pauses the engine between two steps, as vLLM's pause mode `keep` does: turns under way wait. The new weights
are loaded in place. Then all KV is dropped, that of turns under way too, which compute it again. All block hashes get
another seed, so that nothing in the prefix cache, in the host tier or on disk is found that other weights have
computed.

It uses these names of vLLM 0.29 and Ray 2.60 (tests/contracts/test_weights.py):
    LLMServer.pause, resume through VLLMEngine     AsyncLLM.pause_generation, resume_generation
    AsyncLLM.collective_rpc("reload_weights", kwargs={"weights_path": ...})   in each worker
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cluster.core.errors import BadRequest, ControlTimeout, UpstreamFailed
from cluster.core.turn_tokens import INITIAL_WEIGHTS
from cluster.store.client import StoreUnavailable
from cluster.store.weights import WeightsStore, WeightsTarget, refused_with_store
from replicas.checkpoint import check_checkpoint
from replicas.disk_tier.identity import weights_identity

logger = logging.getLogger("ray.serve")

KEEP = {"mode": "keep", "clear_cache": False}
"""vLLM's pause in which turns under way wait."""

SETTLE_ATTEMPTS = 200
SETTLE_S = 0.05
"""Number of short waits in which copies between the tiers may end before an update, and the seconds of each. The engine
steps in those in which turns load their contexts."""

START_ATTEMPTS = 20
START_WAIT_S = 0.5
"""Number of reads of the store at the start of a replica, and the seconds between them."""


class Engine(Protocol):
    """The functions of `replicas.engine.ReplicaEngine` that an update calls."""

    async def pause(self, **options: Any) -> None:
        """Stop between two steps."""
        ...

    async def resume(self, **options: Any) -> None:
        """Go on."""
        ...

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> Any:
        """Call a method of every worker."""
        ...


class Streams(Protocol):
    """The functions of `replicas.resumption.ContinuedClient` that an update calls."""

    def submitted(self) -> frozenset[str]:
        """Return the names of the requests that the engine has got."""
        ...

    def weights_changed(self, version: str, tokens: Mapping[str, int], submitted: Collection[str]) -> None:
        """Report other weights to all requests."""
        ...


Call = Callable[..., Awaitable[dict[str, Any]]]
"""A call of the side channel: the operation, its arguments by name, and ``within_s``, the seconds that it may take."""


class ReplicaWeights:
    """The weights of one replica, and whether it generates.

    Args:
        model: the model's folder or id.
        timeout_s: seconds within which weights have to be loaded, and each call of the scheduler has to be answered.
            It hashes the tokens of all turns again.
        is_failed: called if the weights of the store cannot be loaded. The replica must then end.
        kv_store: the name of the KV store of another project that the replica has. No other weights are then loaded.
    """

    def __init__(
        self, model: str, timeout_s: float, is_failed: Callable[[], None], kv_store: str | None = None
    ) -> None:
        self.version = INITIAL_WEIGHTS
        self.paused = False
        self._model = model
        self._timeout_s = timeout_s
        self._path: str | None = None
        self._is_failed = is_failed
        self._kv_store = kv_store
        self._failure: str | None = None
        self._lock = asyncio.Lock()
        self._engine: Engine | None = None
        self._changes: set[asyncio.Task[None]] = set()

    def open(self, engine: Engine, call: Call, streams: Streams) -> None:
        """Begin.

        Args:
            engine: the started engine.
            call: calls the scheduler.
            streams: the requests, each of which records the versions.
        """
        self._engine, self._call, self._streams = engine, call, streams

    def view(self) -> dict[str, Any]:
        """Return the state for operators."""
        return {"version": self.version, "path": self._path, "paused": self.paused}

    def check(self, path: str) -> None:
        """Check a folder of weights. It does not change anything.

        Raises:
            BadRequest: the folder cannot be loaded, or the replica has a KV store and the weights are others.
        """
        if self._kv_store is not None and not (Path(path).is_dir() and self._salt(path) == ""):
            raise refused_with_store(self._kv_store)
        check_checkpoint(path, self._model)

    async def follow(self, target: WeightsTarget) -> None:
        """Do what has to be done to be as the target says. It is completed if the caller is cancelled meanwhile.

        Raises:
            UpstreamFailed: the weights could not be loaded. The replica ends if it has not the weights that it should
                have, and will not get them soon.
        """

        async def told() -> WeightsTarget:
            return target

        await self._follow(told)

    async def _follow(self, read: Callable[[], Awaitable[WeightsTarget]]) -> None:
        """Do what has to be done to be as ``read`` says. The other exceptions are those of `follow`.

        Raises:
            StoreUnavailable: ``read`` has raised it. Nothing was changed.
        """
        # A change that ends in the middle would leave KV of other weights, or a pause of which nobody knows.
        change = asyncio.create_task(self._change(read))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        try:
            await asyncio.shield(change)
        except asyncio.CancelledError:
            change.add_done_callback(_log_failure)
            raise

    async def _change(self, read: Callable[[], Awaitable[WeightsTarget]]) -> None:
        async with self._lock:
            target = await read()  # what was read before the change in progress may be older than that
            if self._failure is not None:
                raise UpstreamFailed(self._failure)
            if target.paused and not self.paused:
                await self._pause()
                self.paused = True
            if target.path is not None and (target.version, target.path) != (self.version, self._path):
                await self._update(target.version, target.path)
            if self.paused and not target.paused:
                await self._resume()
                self.paused = False

    async def follow_store(self, store: WeightsStore) -> None:
        """Do what the store says. If it does not answer, the replica stays as it is."""
        with suppress(StoreUnavailable):
            await self._follow(store.read)

    async def catch_up(self, store: WeightsStore) -> None:
        """Do what the store says before the replica serves. If it does not answer for long, the model's own weights
        serve, until it does.

        Raises:
            UpstreamFailed: the weights could not be loaded. The replica ends.
        """
        for _ in range(START_ATTEMPTS):
            try:
                await self._follow(store.read)
                return
            except StoreUnavailable:
                await asyncio.sleep(START_WAIT_S)
        logger.warning("Redis does not answer: this replica starts with the weights of the configuration")

    async def _update(self, version: str, path: str) -> None:
        if self._kv_store is not None:  # Redis may have weights from a deployment without it
            try:
                await asyncio.to_thread(self.check, path)
            except BadRequest as error:
                raise self._fail(version, path, error) from error
        if not self.paused:
            await self._pause()
        try:
            await self._settle()
            assert self._engine is not None
            try:
                await asyncio.to_thread(self.check, path)
                salt = await asyncio.to_thread(self._salt, path)
                await self._call("salt_kv", within_s=self._timeout_s, salt=salt)
                async with asyncio.timeout(self._timeout_s):
                    await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
                submitted = self._streams.submitted()
                answer = await self._call("renew_kv", within_s=self._timeout_s, version=version)
            except Exception as error:
                raise self._fail(version, path, error) from error
            except BaseException as error:  # the event loop ends: the KV may be of other weights than the engine's
                self._fail(version, path, error)
                raise
            self._streams.weights_changed(version, answer["tokens"], submitted)
            self.version, self._path = version, path
            logger.info("the weights are %r now, from %s", version, path)
        finally:
            if not self.paused and self._failure is None:
                await self._resume()

    async def _settle(self) -> None:
        """Wait until nothing is being copied into memory that turns own.

        Raises:
            UpstreamFailed: it did not end in time, or the scheduler did not answer. Nothing was changed.
        """
        for _ in range(SETTLE_ATTEMPTS):
            try:
                answer = await self._call("settle", within_s=self._timeout_s)
            except ControlTimeout as error:
                raise UpstreamFailed(f"the weights are not changed: {error}") from error
            if answer["settled"]:
                return
            if not answer["steps"]:
                await asyncio.sleep(SETTLE_S)
                continue
            try:
                await self._resume()
                await asyncio.sleep(SETTLE_S)
            finally:
                await self._pause()
        raise UpstreamFailed("copies between the tiers do not end, so that the weights cannot be changed")

    def _salt(self, path: str) -> str:
        """Return what the block hashes depend on. It is empty for the weights with which the engine started."""
        own = Path(self._model)
        identity = weights_identity(Path(path), None)
        return "" if own.is_dir() and weights_identity(own, None) == identity else identity

    def _fail(self, version: str, path: str, error: BaseException) -> UpstreamFailed:
        """End the replica, since it has not the weights that it should have. Return the error of the update."""
        self._failure = f"the weights {version!r} could not be loaded from {path}: {str(error) or repr(error)}"
        logger.critical("%s; this replica ends so that Ray replaces it", self._failure)
        self._is_failed()
        return UpstreamFailed(self._failure)

    async def _pause(self) -> None:
        assert self._engine is not None
        await self._engine.pause(**KEEP)

    async def _resume(self) -> None:
        assert self._engine is not None
        await self._engine.resume()


def _log_failure(change: asyncio.Task[None]) -> None:
    """Log why a change failed for which nobody waits any more."""
    if not change.cancelled() and (error := change.exception()) is not None:
        logger.error("a change of the weights failed, for which nobody waits: %s", error)
