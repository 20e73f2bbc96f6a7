"""The host tier with the disk tier below it, as one manager for vLLM's connector.

vLLM's `TieringOffloadingManager` moves chunks between the two: a lookup that misses on the host asks the disk, and
loads what it finds into the host tier, from where the connector loads it. Here that is limited to programs, and to
loads that take less time than computing. vLLM writes each chunk to all tiers at once. Here the context of a program is
written when it pauses, if it is worth it (`replicas.disk_tier.value`).

`TieredSpec` is the spec for vLLM's connector. Host memory is shared by the engine's process, which reads and writes
files, and by the workers, which copy to and from the device.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import ConfigError
from replicas.copying_worker import CopyingWorker
from replicas.disk_tier.identity import folder_name
from replicas.disk_tier.numbers import DiskNumbers
from replicas.disk_tier.slots import Slots
from replicas.disk_tier.tier import DiskTier
from replicas.disk_tier.trouble import Trouble
from replicas.disk_tier.value import WriteOutcome, disk_standing, refusal
from replicas.host_tier import Account, HostCache, HostTierSpec, Standing
from replicas.tier_size import SHARED_MEMORY
from replicas.vllm_versions import HostChunks, offload_region, tier_chunks

SHORTEST_WAIT_S = 0.5
"""Shortest time in seconds that a turn waits for a load. Longer contexts wait as long as computing would take."""
COPY_WAIT_S = 2.0
"""Longest time in seconds from a pause until the host has the context. What is there then is written."""


class HostOverDisk(HostCache):
    """The host tier, as vLLM's tiering expects it: with reads and writes from below.

    Args:
        region: its memory.
        num_chunks: capacity of the tier, in chunks.
        tokens_per_chunk: tokens of a chunk in the first KV cache group.
        program_share: largest share of the chunks for one program, in (0, 1].
        enable_events: whether vLLM's KV events are on.
    """

    def __init__(
        self,
        region: SharedOffloadRegion,
        num_chunks: int,
        tokens_per_chunk: int,
        program_share: float,
        enable_events: bool,
    ) -> None:
        super().__init__(num_chunks, tokens_per_chunk, program_share, enable_events)
        self._region = region
        self._rows: memoryview = region.create_kv_memoryview()

    def get_kv_memoryview(self) -> memoryview:
        """Return the memory, a row for each chunk."""
        return self._rows

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks that are about to be written to disk."""
        return self.prepare_load(keys, req_context)

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin chunks that were written to disk."""
        HostChunks.complete_load(self, keys, req_context)

    def prepare_write(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Make room for chunks that are about to be loaded from disk. Return None if there is not enough for all."""
        output = self.prepare_store(keys, req_context)
        return None if output is None or len(output.keys_to_store) < len(keys) else output

    def complete_write(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Record that the chunks were loaded from disk, or that the load failed."""
        HostChunks.complete_store(self, keys, req_context, success)

    def shutdown(self) -> None:
        """Give the memory back. If a thread hangs in the volume with a part of it, the end of the process does."""
        super().shutdown()
        with suppress(BufferError):
            self._rows.release()
        self._region.cleanup()


@dataclass(slots=True)
class Loading:
    """What a request may load from disk."""

    reads: bool
    wait_s: float
    """Seconds that it waits at most."""
    since_s: float | None = None
    """Time of the first lookup that found something to wait for."""
    given_up: bool = False
    local_tokens: int = 0
    """Tokens before the first chunk that was looked up."""
    awaited: tuple[OffloadKey, ReqContext] | None = None
    """The first chunk of the last lookups that is being loaded."""
    unsure: bool = False
    """Whether it is not known yet where a chunk of the last lookups is."""

    def in_time(self, now_s: float) -> bool:
        """Return whether the request may still wait."""
        return self.since_s is None or now_s - self.since_s <= self.wait_s


@dataclass(slots=True)
class Pending:
    """A paused program whose context is written when the host has it."""

    standing: Standing
    chunks: int
    until_s: float
    ready: int = 0
    """Leading chunks of the main KV cache group that a tier was seen to have."""


class TieredCache(TieringOffloadingManager):
    """The manager of both tiers.

    It uses these names of vLLM's manager beside its interface: _req_state, _maybe_finalize_request, create_store_job,
    _complete_promotion, _process_finished_jobs, _maybe_process_finished_jobs.

    Args:
        host: the host tier.
        disk: the disk tier.
        clock: a monotonic clock.
    """

    def __init__(self, host: HostOverDisk, disk: DiskTier, clock: Clock) -> None:
        super().__init__(primary_tier=host, secondary_tiers=[disk])
        self.host = host
        self.disk = disk
        self.outcomes: Counter[WriteOutcome] = Counter()
        """Number of pauses, by what became of the context."""
        self.leaving = False
        """Whether the programs leave this replica at their pauses, so that they need their contexts on disk."""
        self._clock = clock
        self._loading: dict[str, Loading] = {}
        self._pending: dict[str, Pending] = {}
        self._loaded: Counter[str] = Counter()
        """Number of chunks that were loaded from disk in time since the program's last turn, by program."""

    # --- for the scheduler --------------------------------------------------------------------------------------------

    def write_down(self, program: str, context_tokens: int, standing: Standing) -> None:
        """Write the context of a program that has paused, if it is worth it. The next steps do it.

        Args:
            program: the program's key.
            context_tokens: tokens of the context.
            standing: its standing on the host.
        """
        chunks = context_tokens // self.host.tokens_per_chunk
        if not self.disk.writable:
            self.outcomes[WriteOutcome.STOPPED] += 1
            return
        on_disk = disk_standing(standing, self.disk.read_s)
        write_s = self.disk.backlog_s + chunks * self.host.num_groups * self.disk.write_speed.chunk_s
        refused = refusal(on_disk, write_s, leaving=self.leaving) if chunks else WriteOutcome.NO_GAIN
        if refused is not None:
            self.outcomes[refused] += 1
            return
        self._pending[program] = Pending(on_disk, chunks, self._clock.now_s() + COPY_WAIT_S)

    def follow(self, program: str, standing: Standing) -> None:
        """Update what the program's copy on disk is worth."""
        if program in self.disk.chunks.accounts:
            self.disk.chunks.update(program, disk_standing(standing, self.disk.read_s))

    def tokens_of(self, program: str) -> int:
        """Return how many tokens of a program's context are on disk, counted from the first one."""
        return self.disk.chunks_of(program) * self.host.tokens_per_chunk

    def writes(self, program: str) -> bool:
        """Return whether the program's context is about to be written."""
        return program in self._pending

    @property
    def busy(self) -> bool:
        """Whether contexts are still to be written."""
        return bool(self._pending) or self.disk.writing

    def uses_disk(self) -> bool:
        """Process the transfers that have ended between two steps. Return whether any is still in progress."""
        self._process_finished_jobs()
        return self.disk.in_use

    def abandon_writes(self) -> None:
        """Begin no write of the contexts that are still to be written."""
        self._pending.clear()

    def forget(self, program: str) -> None:
        """Delete the copy of a program that has ended."""
        self._pending.pop(program, None)
        self._loaded.pop(program, None)
        self.disk.forget(program)

    def disown(self, program: str) -> None:
        """Keep the copy of a program that has moved to another replica."""
        self._pending.pop(program, None)
        self.disk.disown(program)

    def take_loaded_tokens(self, program: str) -> int:
        """Return the tokens that were loaded from disk for the program since this was asked last."""
        return self._loaded.pop(program, 0) // self.host.num_groups * self.host.tokens_per_chunk

    def numbers(self) -> DiskNumbers:
        """Return the totals and the state of the disk tier."""
        return self.disk.numbers(self.outcomes)

    # --- loads --------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> LookupResult:
        """Look a chunk up on the host, then on disk if the request may load from there."""
        loading = self._loading_of(req_context)
        if not loading.reads or loading.given_up:
            found = self.host.lookup(key, req_context)
            return LookupResult.MISS if loading.given_up and found is LookupResult.HIT_PENDING else found
        found = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        if found in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            if found is LookupResult.RETRY:
                loading.unsure = True
            elif loading.awaited is None:
                loading.awaited = key, req_context
            now_s = self._clock.now_s()
            loading.since_s = now_s if loading.since_s is None else loading.since_s
            if not loading.in_time(now_s):
                loading.given_up = True
                self.disk.troubles[Trouble.TOO_LATE] += 1
                return LookupResult.MISS
        return found

    def still_loads(self, request_id: str, local_tokens: int) -> bool:
        """Return whether lookups of a request would find again that a part of its context is being loaded.

        If not, its next lookups begin anew. A context has thousands of chunks, which would be looked up in each step.

        Args:
            request_id: the request.
            local_tokens: tokens of its context that the device has. Lookups begin after them.
        """
        loading = self._loading.get(request_id)
        if loading is None:
            return False
        self._maybe_process_finished_jobs()
        if (
            loading.awaited is not None
            and not (loading.unsure or loading.given_up)
            and loading.local_tokens == local_tokens
            and loading.in_time(self._clock.now_s())
            and self.host.lookup(*loading.awaited) is LookupResult.HIT_PENDING
        ):
            return True
        loading.local_tokens, loading.awaited, loading.unsure = local_tokens, None, False
        return False

    def _loading_of(self, req_context: ReqContext) -> Loading:
        loading = self._loading.get(req_context.req_id)
        if loading is None:
            account = self.host.account(req_context)
            standing = account.standing if account else None
            reads = (
                standing is not None and disk_standing(replace(standing, returns=True), self.disk.read_s).saved_s > 0
            )
            loading = self._loading[req_context.req_id] = Loading(reads, SHORTEST_WAIT_S)
        if loading.since_s is None and loading.reads and (account := self.host.account(req_context)):
            tokens = len(account.keys) * self.host.tokens_per_chunk
            loading.wait_s = max(SHORTEST_WAIT_S, tokens * account.standing.computed_s)
        return loading

    def _complete_promotion(self, job_metadata: Any, completed_job: Any) -> None:
        super()._complete_promotion(job_metadata, completed_job)
        job = job_metadata.transfer_job
        account, loading = self.host.account(job.req_context), self._loading.get(job.req_context.req_id)
        if account is not None and loading is not None and not loading.given_up:
            loaded = len(job.keys) if completed_job.success else len(completed_job.successful_keys or ())
            self._loaded[account.key] += loaded

    def on_request_finished(self, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> None:
        """Stop counting what is loaded from disk for a request that has ended, and report its end to all tiers."""
        self._loading.pop(req_context.req_id, None)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    # --- writes -------------------------------------------------------------------------------------------------------

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Record that the chunks are on the host now. vLLM would write them to disk here."""
        self.host.complete_store(keys, req_context, success)
        state = self._req_state.get(req_context.req_id)
        if state is not None and state.pending_primary_stores > 0:
            state.pending_primary_stores -= 1
            self._maybe_finalize_request(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End a step: move what is to be moved, and begin to write contexts that the host has."""
        super().on_schedule_end(context)
        for program, pending in list(self._pending.items()):
            account = self.host.chunks.accounts.get(program)
            if self._is_whole(account, pending) or self._clock.now_s() >= pending.until_s:
                del self._pending[program]
                self._write(program, pending, self._ready(account))

    def has_pending_work(self) -> bool:
        """Return whether the engine has to step although it has no requests."""
        return bool(self._pending) or super().has_pending_work()

    def reset_cache(self) -> None:
        """Delete all copies on the host and on disk, and forget the loads from disk that are awaited."""
        self._pending.clear()
        super().reset_cache()
        self.disk.reset()

    def _is_whole(self, account: Account | None, pending: Pending) -> bool:
        """Return whether a tier has all chunks of a program's context. It asks for those not seen before only."""
        keys = account.keys if account else []
        pending.ready += len(self._leading_of(keys[pending.ready : pending.chunks]))
        return pending.ready >= pending.chunks

    def _ready(self, account: Account | None) -> list[list[OffloadKey]]:
        """Return the leading chunks of a program's context that a tier has, for each KV cache group."""
        contexts = account.contexts.values() if account else ()
        return [there for context in contexts if (there := self._leading_of(context.keys))]

    def _leading_of(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the leading chunks of ``keys`` that are on disk, are being written, or are on the host."""
        return list(takewhile(self._is_there, keys))

    def _is_there(self, key: OffloadKey) -> bool:
        status = self.host.chunks.blocks.get(key)
        return (status is not None and status.ref_cnt >= 0) or key in self.disk.chunks.blocks

    def _write(self, program: str, pending: Pending, ready: list[list[OffloadKey]]) -> None:
        if not ready:
            self.outcomes[WriteOutcome.NOT_ON_HOST] += 1
            return
        if not self.disk.writable:
            self.outcomes[WriteOutcome.STOPPED] += 1
            return
        wanted = sum(key not in self.disk.chunks.blocks for keys in ready for key in keys)
        accepted = self.disk.reserve(program, pending.standing, ready)
        self.outcomes[WriteOutcome.WRITTEN if len(accepted) == wanted else WriteOutcome.NO_ROOM] += 1
        chunks = self._leading(ready)
        if accepted:
            job = self.create_store_job(accepted, ReqContext(f"caesura-write-{program}"))
            self.disk.submit_store(job)
            self.disk.writes_copy(job.job_id, program, chunks)
        elif chunks:
            self.disk.has_all(program, chunks)

    def _leading(self, ready: list[list[OffloadKey]]) -> int:
        """Return how many leading chunks of the main KV cache group are on disk when the accepted ones are written."""
        main = self.host.chunks.main
        keys = next((keys for keys in ready if get_offload_group_idx(keys[0]) == main), [])
        return next((number for number, key in enumerate(keys) if key not in self.disk.chunks.blocks), len(keys))


class TieredSpec(HostTierSpec, TieringOffloadingSpec):
    """What vLLM's connector requests: the manager of both tiers, and the worker that copies to the host's.

    Raises:
        ConfigError: the settings of the disk tier are missing.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if not self.extra_config.get("disk_identity"):
            raise ConfigError("the disk tier has no identity: replicas.disk_tier.identity was not asked for one")

    def get_manager(self) -> OffloadingManager:
        """Return the manager, for the scheduler."""
        if self._manager is None:
            self._check_workers()
            region = offload_region(self, rank=None)
            # The workers have opened it before. Without a name the memory is freed when the last process ends.
            Path(region.mmap_path).unlink(missing_ok=True)
            region._creator = False
            clock, replicas = MonotonicClock(), int(self.extra_config["replicas_here"])
            host = HostOverDisk(
                region,
                num_chunks=tier_chunks(self),
                tokens_per_chunk=self.tokens_per_block[0],
                program_share=float(self.extra_config["program_share"]),
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
            disk = DiskTier(
                self,
                host.get_kv_memoryview(),
                chunk_tokens=host.tokens_per_chunk,
                slots=Slots(Path(self.extra_config["disk_path"]), folder_name(self), replicas),
                capacity_bytes=int(self.extra_config["disk_bytes"]),
                clock=clock,
            )
            self._manager = TieredCache(host, disk, clock)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker, for the engine's worker. On CUDA it is vLLM's own."""
        if self._worker is None:
            if CPUOffloadingSpec._uses_shared_region(self):
                region = CPUOffloadingSpec.get_worker(self, kv_caches)._mmap_region
            else:
                region = offload_region(self, rank=self.config.parallel.rank)
                self._worker = CopyingWorker(kv_caches, tier_chunks(self), region)
            region._creator = False  # the manager removes the name
            self._mark(self.config.parallel.rank).touch()
        return self._worker

    def _check_workers(self) -> None:
        """Raise ConfigError unless all workers share this machine's memory. The KV of others would not be written."""
        marks = [self._mark(rank) for rank in range(self.config.parallel.world_size)]
        elsewhere = [rank for rank, mark in enumerate(marks) if not mark.exists()]
        for mark in marks:
            mark.unlink(missing_ok=True)
        if elsewhere:
            raise ConfigError(
                f"replicas.disk_tier: a replica has to be on one machine; workers {elsewhere} are on others"
            )

    def _mark(self, rank: int) -> Path:
        """Return the file by which a worker shows that it has opened the memory."""
        return SHARED_MEMORY / f"caesura_offload_{self.config.engine_id}.{rank}"
