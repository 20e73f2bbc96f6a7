"""The disk tier of a virtual replica: `replicas.disk_tier` runs unchanged, but nothing is read or written.

A volume only knows which slot has which chunks. Each replica has a drive of its own, whose reads come one after the
other, and whose writes do, too. A lookup is answered at once. A transfer ends when its time is over.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from cluster.core.clock import Clock
from replicas.disk_tier.cache import HostOverDisk, TieredCache
from replicas.disk_tier.chunk_file import file_bytes
from replicas.disk_tier.tier import DiskTier, Transfer
from replicas.disk_tier.trouble import Direction
from replicas.disk_tier.value import Speed
from replicas.host_tier import HostTierSpec, kv_transfer_config
from replicas.vllm_versions import tier_chunks

DISK_KEY = "virtual_disk"
"""The key of the connector's extra configuration that has the `VirtualDisk`."""


@dataclass(slots=True)
class VirtualVolume:
    """A volume that several virtual replicas read and write."""

    name: str
    slots: dict[int, set[OffloadKey]] = field(default_factory=dict)
    """The chunks by the number of the slot."""

    def has(self, key: OffloadKey) -> bool:
        """Return whether any slot has a chunk."""
        return any(key in chunks for chunks in self.slots.values())


@dataclass(frozen=True, slots=True)
class VirtualDisk:
    """The drive of one virtual replica."""

    volume: VirtualVolume
    slot: int
    """Number of its slot, which only this replica has."""
    clock: Clock
    chunks: int
    """Capacity of the slot."""
    chunk_bytes: int
    read_chunk_s: float
    write_chunk_s: float

    def transfer_config(self, host_bytes: int) -> dict[str, Any]:
        """Return vLLM's ``kv_transfer_config`` of a host tier of so many bytes above this disk."""
        config = kv_transfer_config(host_bytes)
        spec = {"spec_name": VirtualTieredSpec.__name__, "spec_module_path": __name__, DISK_KEY: self}
        return {**config, "kv_connector_extra_config": {**config["kv_connector_extra_config"], **spec}}


class VirtualTieredSpec(HostTierSpec):
    """What vLLM's connector requests: the manager of both tiers, without memory and without files."""

    def get_manager(self) -> OffloadingManager:
        """Return the manager, for the scheduler."""
        if self._manager is None:
            disk: VirtualDisk = self.extra_config[DISK_KEY]
            host = HostOverDisk(
                _NoMemory(disk.chunk_bytes),
                num_chunks=tier_chunks(self),
                tokens_per_chunk=self.tokens_per_block[0],
                program_share=float(self.extra_config["program_share"]),
                enable_events=False,
            )
            self._manager = TieredCache(host, VirtualDiskTier(self, host, disk), disk.clock)
        return self._manager


class _NoMemory:
    """Stands for the host tier's memory. It has one row, whose length is all that is asked for."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(self._chunk_bytes)).cast("B", (1, self._chunk_bytes))

    def cleanup(self) -> None:
        """Nothing is to be given back."""


class _Slots:
    """The slot of one replica, in place of `replicas.disk_tier.slots.Slots`."""

    count, generation = 1, ""

    def __init__(self, disk: VirtualDisk) -> None:
        self.volume, self.own = disk.volume.name, disk.slot

    def own_file(self, key: OffloadKey) -> OffloadKey:
        return key

    def release(self) -> None:
        """Nothing is locked."""


class VirtualDiskTier(DiskTier):
    """The disk tier without threads and files.

    Args:
        spec: vLLM's offloading spec.
        host: the tier above.
        disk: the drive.
    """

    def __init__(self, spec: Any, host: HostOverDisk, disk: VirtualDisk) -> None:
        self._disk = disk
        self._own = disk.volume.slots.setdefault(disk.slot, set())
        super().__init__(
            spec,
            host.get_kv_memoryview(),
            chunk_tokens=host.tokens_per_chunk,
            slots=_Slots(disk),  # type: ignore[arg-type]
            capacity_bytes=disk.chunks * file_bytes(disk.chunk_bytes),
            clock=disk.clock,
        )
        self.read_speed, self.write_speed = Speed(disk.read_chunk_s), Speed(disk.write_chunk_s)
        self._open = self._writes = True

    def _begin_workers(self) -> None:
        self._pool = self._lookups = self._janitor = _Drive(self)

    @property
    def next_end_s(self) -> float | None:
        """Time at which the next transfer ends, or None if none is in progress."""
        drive: _Drive = self._pool
        return min((way[0][0] for way in drive.under_way.values() if way), default=None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a slot has the chunk."""
        return LookupResult.HIT if self.has(key) else LookupResult.MISS

    def has(self, key: OffloadKey) -> bool:
        """Return whether a slot has the chunk."""
        return self._disk.volume.has(key)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write chunks that were reserved."""
        transfer = self._begin(Direction.WRITE, job_metadata)
        self._own.difference_update(self._victims)
        self._victims.clear()
        transfer.linked = {key for key in transfer.keys if self.has(key)}
        self._submit(
            job_metadata.job_id, transfer, self._disk.write_chunk_s * (len(transfer.keys) - len(transfer.linked))
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks."""
        transfer = self._begin(Direction.READ, job_metadata)
        self._submit(job_metadata.job_id, transfer, self._disk.read_chunk_s * len(transfer.keys))

    def _submit(self, job_id: int, transfer: Transfer, seconds: float) -> None:
        drive: _Drive = self._pool
        transfer.seconds = seconds
        transfer.progress_s = drive.submit(job_id, transfer.direction, self._clock.now_s(), seconds)

    def abandon(self) -> None:
        """End the writes now. Of each, the chunks that its drive has written so far stay."""
        now_s, chunk_s, drive = self._clock.now_s(), self._disk.write_chunk_s, self._pool
        writes, drive.under_way[Direction.WRITE] = drive.under_way[Direction.WRITE], deque()
        for end_s, job_id in writes:
            transfer = self._transfers[job_id]
            written = max(0, int((now_s - (end_s - transfer.seconds)) / chunk_s))
            transfer.done = {*transfer.keys[:written]}
            drive.under_way[Direction.WRITE].append((min(now_s, end_s), job_id))

    def finish(self, job_id: int) -> None:
        """Do what a transfer does, whose time is over."""
        transfer = self._transfers[job_id]
        if transfer.direction is Direction.WRITE:
            is_whole = self._clock.now_s() >= transfer.progress_s
            transfer.done = {*transfer.keys} if is_whole else transfer.done
            self._own.update(transfer.done)
        else:
            transfer.done = {key for key in transfer.keys if self.has(key)}

    def remove(self, key: OffloadKey) -> None:
        """Delete a chunk of this slot."""
        self._own.discard(key)


class _Drive:
    """The transfers in progress, in place of the threads that do them, look chunks up and delete files."""

    def __init__(self, tier: VirtualDiskTier) -> None:
        self._tier = tier
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self.under_way: dict[Direction, deque[tuple[float, int]]] = {direction: deque() for direction in Direction}
        """Pairs (end in seconds, job id), by direction."""

    def submit(self, job_id: int, direction: Direction, now_s: float, seconds: float) -> float:
        """Begin a transfer after those in its direction. Return the time of its end."""
        end_s = self._free_at_s[direction] = max(now_s, self._free_at_s[direction]) + seconds
        self.under_way[direction].append((end_s, job_id))
        return end_s

    def get_finished(self) -> Iterable[tuple[int, bool, float]]:
        """Return the transfers whose time is over."""
        now_s, ended = self._tier._clock.now_s(), []
        for way in self.under_way.values():
            while way and way[0][0] <= now_s:
                _, job_id = way.popleft()
                self._tier.finish(job_id)
                ended.append((job_id, True, 0.0))
        return ended

    def delete(self, key: OffloadKey) -> None:
        """Delete a chunk."""
        self._tier.remove(key)

    def mark_miss(self, keys: Iterable[OffloadKey]) -> None:
        """Nothing is remembered."""

    def cleanup(self, request_id: str) -> None:
        """Nothing is remembered."""

    def flush(self) -> None:
        """Lookups are answered at once."""
