"""The disk tier: a secondary tier of vLLM's offloading, below the host tier.

vLLM's own tier in the file system (`vllm.v1.kv_offload.tiering.fs`) has no bound, no checksum and no clean-up, and it
does not know programs. This one has vLLM's interface, its threads and its asynchronous lookups, and these in addition:
`chunk_file` recognises damaged chunks, `slots` bound what a replica writes, and `replicas.host_tier.ProgramChunks`
chooses what is evicted, as on the host.

All methods run on the engine's thread and do no I/O. The volume is opened, scanned and cleaned by a thread of its own,
because it may hang. A volume that fails stops the direction that failed for RETRY_S, under a name (`Trouble`) that
metrics and the log have. The replica serves on as if there was no disk tier.
"""

import errno
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import inf
from pathlib import Path
from threading import get_ident
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from cluster.core.clock import Clock
from replicas.disk_tier.chunk_file import ChunkFiles, DamagedChunkError, file_bytes
from replicas.disk_tier.janitor import END_S, RETRY_S, Janitor
from replicas.disk_tier.numbers import DiskNumbers
from replicas.disk_tier.slots import Slots
from replicas.disk_tier.trouble import TROUBLE_OF_ERRNO, Direction, Trouble
from replicas.disk_tier.value import WriteOutcome, assumed_speed
from replicas.host_tier import ProgramChunks, Standing
from replicas.vllm_versions import DRAINS_LATE_LOOKUPS, ChunkStatus, job_rows

logger = logging.getLogger("vllm.caesura.disk_tier")

READERS, WRITERS = 4, 2
"""Number of threads that read, and that write. Each also does the other's work where its own has none."""
STALL_S = 5.0
"""Seconds without progress after which a transfer counts as stalled. While a transfer waits for a thread, the progress
of the others counts."""


@dataclass(slots=True)
class Transfer:
    """A job in progress. The threads that do it write the fields after ``keys``."""

    direction: Direction
    keys: list[OffloadKey]
    progress_s: float
    threads: set[int] = field(default_factory=set)
    """Threads that do a part of it now. It is empty while the transfer waits for a thread."""
    done: set[OffloadKey] = field(default_factory=set)
    linked: set[OffloadKey] = field(default_factory=set)
    """Chunks that needed no write, because another slot had them."""
    seconds: float = 0.0
    """Time of the slowest of its parts."""
    copy: tuple[str, int] | None = None
    """The program whose context is written, and the chunks that it has on disk when all are done."""


class DiskTier(SecondaryTierManager):
    """The disk tier of one replica.

    Args:
        spec: vLLM's offloading spec.
        rows: the host tier's memory, a row for each chunk.
        chunk_tokens: tokens of a chunk in the first KV cache group. `count_in` sets those of another one.
        slots: the folders.
        capacity_bytes: size of all slots together.
        clock: a monotonic clock.
        files: makes what writes and reads files, given whether direct I/O works on the volume.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        spec: OffloadingSpec,
        rows: memoryview,
        *,
        chunk_tokens: int,
        slots: Slots,
        capacity_bytes: int,
        clock: Clock,
        files: Callable[[bool], ChunkFiles] = ChunkFiles,
    ) -> None:
        super().__init__(spec, rows, "disk")
        assert rows.strides is not None
        self.chunk_tokens = chunk_tokens
        self.num_groups = 1
        self.chunk_bytes: int = rows.strides[0]
        self.chunks = ProgramChunks(capacity_bytes // slots.count // file_bytes(self.chunk_bytes))
        self.read_speed, self.write_speed = assumed_speed(self.chunk_bytes), assumed_speed(self.chunk_bytes)
        self.bytes: Counter[Direction] = Counter()
        self.seconds = dict.fromkeys(Direction, 0.0)
        self.troubles: Counter[Trouble] = Counter()
        """Number of transfers and chunks that failed, by what was wrong."""
        self._flat = rows.cast("B")
        self._slots = slots
        self._clock = clock
        self._make_files = files
        self._files = files(False)
        self._transfers: dict[int, Transfer] = {}
        self._progress_s = clock.now_s()
        """Time of the last progress of any transfer that :meth:`_find_stalled` or :meth:`get_finished_jobs` saw."""
        self._stopped: dict[Direction, tuple[Trouble, float]] = {}
        """Directions that have failed, with the time at which they are tried again."""
        self._copies: dict[str, int] = {}
        """Leading chunks of the main KV cache group of each program's context that were written."""
        self._fresh: list[str] = []
        self._forgotten: set[OffloadKey] = set()
        """Chunks that are deleted when their write has ended."""
        self._victims: list[Path] = []
        self._reports: deque[Callable[[], None]] = deque()
        """What threads report, for the engine's thread."""
        self._open = False
        self._writes = False
        self._pool: Any = None
        self._lookups: Any = None
        self._janitor: Any = None
        self._begin_workers()

    def _begin_workers(self) -> None:
        """Start what does I/O. A subclass may replace it."""
        self._pool = DualQueueThreadPool(READERS, WRITERS, thread_name_prefix="caesura_disk")
        self._lookups = SlotLookup(self)
        wanted_bytes = file_bytes(self.chunk_bytes)
        self._janitor = Janitor(self._slots, self._clock, wanted_bytes, self._opened, self.report_failure)

    # --- for the scheduler --------------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Whether chunks can be looked up and loaded now."""
        return self._open and not self._is_stopped(Direction.READ)

    @property
    def writable(self) -> bool:
        """Whether chunks can be written now."""
        return self._writes and not self._is_stopped(Direction.WRITE)

    @property
    def volume(self) -> str:
        """The name of the volume, which all replicas have that see it and read what this one writes.

        It is empty while nothing can be read, and once the files are for this process only.
        """
        return self._slots.volume if self.readable and not self._slots.generation else ""

    @property
    def read_s(self) -> float:
        """Measured seconds to read one token. Infinite: nothing can be read."""
        return self.read_speed.chunk_s * self.num_groups / self.chunk_tokens if self.readable else inf

    def count_in(self, group: int, tokens_per_chunk: int, num_groups: int) -> None:
        """Choose the KV cache group in which tokens are counted, as `replicas.host_tier.HostCache.count_in` does."""
        self.chunks.main, self.chunk_tokens, self.num_groups = group, tokens_per_chunk, num_groups

    @property
    def writing(self) -> bool:
        """Whether anything is being written."""
        return any(transfer.direction is Direction.WRITE for transfer in self._transfers.values())

    @property
    def in_use(self) -> bool:
        """Whether the host tier's memory is read or written by threads, which may hang in the volume."""
        return bool(self._transfers)

    @property
    def backlog_s(self) -> float:
        """Seconds until all that is being written is written."""
        left = (len(t.keys) - len(t.done) for t in self._transfers.values() if t.direction is Direction.WRITE)
        return sum(left) * self.write_speed.chunk_s

    def reserve(self, program: str, standing: Standing, contexts: Sequence[Sequence[OffloadKey]]) -> list[OffloadKey]:
        """Make room for a program's context. Return the chunks that are to be written now.

        Args:
            program: the program's key.
            standing: its standing on disk.
            contexts: the chunks of its context that the host has, for each KV cache group from the first on.
        """
        self.chunks.now_s = self._clock.now_s()
        account = self.chunks.update(program, standing)
        wanted: list[OffloadKey] = []
        for keys in contexts:
            self.chunks.extend(account, "", list(keys))
            self._forgotten.difference_update(keys)
            wanted += [key for key in keys if key not in self.chunks.blocks]
        self.chunks.storing = account
        short = len(wanted) - (self.chunks.cache_capacity - len(self.chunks.blocks))
        victims = self.chunks.victims(short, {key for keys in contexts for key in keys}) if short > 0 else []
        for key, _ in victims:
            self.chunks.remove(key)
            self._victims.append(self._slots.own_file(key))
        accepted = wanted[: len(wanted) - max(0, short - len(victims))]
        for key in accepted:
            self.chunks.insert(key, ChunkStatus(0))  # which is not evicted before it is written
        return accepted

    def chunks_of(self, program: str) -> int:
        """Return how many leading chunks of a program's context this replica has on disk, written completely."""
        written = self._copies.get(program, 0)
        account = self.chunks.accounts.get(program) if written else None
        return min(written, self.chunks.leading(account)) if account is not None else 0

    def take_written(self) -> list[str]:
        """Return the programs whose contexts were written completely since the last call."""
        written, self._fresh = self._fresh, []
        return written

    def has_all(self, program: str, chunks: int) -> None:
        """Record that so many leading chunks of a program's context are on disk."""
        self._copies[program] = chunks
        self._fresh.append(program)

    def writes_copy(self, job_id: int, program: str, chunks: int) -> None:
        """Note whose context a write that has begun completes, and how many leading chunks are then on disk."""
        self._transfers[job_id].copy = (program, chunks)

    def forget(self, program: str) -> None:
        """Delete the chunks of a program that has ended, except those of other programs too."""
        self._copies.pop(program, None)
        for key in self.chunks.drop(program):
            if self.chunks.blocks[key].ref_cnt < 0:
                self._forgotten.add(key)
            else:
                self._delete(key)

    def disown(self, program: str) -> None:
        """Keep the chunks of a program that has moved to another replica, which may load them, until room is needed."""
        self._copies.pop(program, None)
        self.chunks.drop(program)

    def reset(self) -> None:
        """Ignore all files from now on, because the weights may have been replaced. Those of this replica are deleted.

        What is written from now on is for this process only. No transfer may be in progress.
        """
        for key in list(self.chunks.blocks):
            self._delete(key)
        self._copies.clear()
        self._slots.generation = f"-{os.getpid()}-{os.urandom(4).hex()}"

    def numbers(self, writes: Mapping[WriteOutcome, int]) -> DiskNumbers:
        """Return the totals and the state.

        Args:
            writes: number of pauses, by what became of the context.
        """
        self.take_reports()
        return DiskNumbers(
            tokens=self.chunks.cache_capacity // self.num_groups * self.chunk_tokens if self._writes else 0,
            used_tokens=len(self.chunks.blocks) // self.num_groups * self.chunk_tokens,
            bytes=self.bytes,
            seconds=self.seconds,
            troubles=self.troubles,
            degraded=[trouble for trouble, _ in self._stopped.values()],
            writes=writes,
        )

    # --- vLLM's SecondaryTierManager ----------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Do nothing: programs are written down, not requests."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a slot has the chunk. RETRY: it is being looked up."""
        if not self.readable:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write chunks that were reserved."""
        transfer = self._begin(Direction.WRITE, job_metadata)
        victims, self._victims = self._victims, []
        self._janitor.doom(victims)
        parts = self._parts(job_metadata, WRITERS)
        # The first part makes room.
        tasks = [self._task(self._write, transfer, part, victims if not part[0][0] else []) for part in parts]
        self._pool.enqueue_store(job_metadata.job_id, len(tasks), tasks)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks."""
        transfer = self._begin(Direction.READ, job_metadata)
        tasks = [self._task(self._read, transfer, part) for part in self._parts(job_metadata, READERS)]
        self._pool.enqueue_load(job_metadata.job_id, len(tasks), tasks)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended. A load keeps the chunks before the first bad one."""
        self.take_reports()
        results = []
        for job_id, *_ in self._pool.get_finished():
            transfer = self._transfers.pop(job_id)
            self._progress_s = max(self._progress_s, transfer.progress_s)
            self._count(transfer)
            if transfer.direction is Direction.WRITE:
                self._written(transfer)
                results.append(JobResult(job_id, True, transfer_time=transfer.seconds))
                continue
            good = list(takewhile(transfer.done.__contains__, transfer.keys))
            bad = transfer.keys[len(good) :]
            self._lookups.mark_miss(bad)
            kept = None if not bad or not good else tuple(good)
            results.append(JobResult(job_id, not bad, successful_keys=kept, transfer_time=transfer.seconds))
        self._find_stalled()
        return results

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's lookups."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Begin the step's lookups."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until no thread reads or writes the host tier's memory."""
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """End the threads, and leave the files for the next replica. A thread that hangs in the volume is left."""
        self._pool.shutdown(wait=False)
        self._lookups.shutdown()
        self._janitor.shutdown()
        for thread in self._pool._threads:
            thread.join(END_S)
        with suppress(BufferError):  # a thread that hangs has a part of it
            self._flat.release()
        self._slots.release()

    # --- in threads ---------------------------------------------------------------------------------------------------

    def has(self, key: OffloadKey) -> bool:
        """Return whether a slot has a chunk. It asks the volume, and is therefore for threads only."""
        return self._slots.find(key) is not None

    def _task(self, run: Callable[..., None], transfer: Transfer, *arguments: Any) -> Callable[[], None]:
        def task() -> None:
            began_s = transfer.progress_s = self._clock.now_s()
            transfer.threads.add(get_ident())
            try:
                run(transfer, *arguments)
            finally:
                transfer.threads.discard(get_ident())
            transfer.seconds = max(transfer.seconds, self._clock.now_s() - began_s)

        return task

    def _write(self, transfer: Transfer, part: Sequence[tuple[int, OffloadKey, int]], victims: Sequence[Path]) -> None:
        try:
            # All are tried, and those that fail are tried again later. But nothing is written beyond the slot's size.
            errors = [error for path in victims if (error := self._janitor.unlink(path)) is not None]
            if errors:
                raise errors[0]
            for _, key, row in part:
                path = self._slots.own_file(key)
                self._janitor.keep(path)
                found = self._slots.find(key)
                if found is not None and found != path and self._files.link(found, path):
                    transfer.linked.add(key)
                elif found != path or not _touched(path):
                    self._files.write(path, self._name_in_file(key), self._row(row))
                transfer.done.add(key)
                transfer.progress_s = self._clock.now_s()
        except OSError as error:
            self.report_failure(Direction.WRITE, error)

    def _read(self, transfer: Transfer, part: Sequence[tuple[int, OffloadKey, int]]) -> None:
        for _, key, row in part:
            path = None
            try:
                path = self._slots.find(key)
                if path is None:
                    raise FileNotFoundError(errno.ENOENT, "no slot has the chunk")
                self._files.read(path, self._name_in_file(key), self._row(row))
                with suppress(OSError):
                    os.utime(path)
            except DamagedChunkError as error:
                # Others are read nevertheless. So all damaged chunks of the context are found at once.
                if path is not None:
                    with suppress(OSError):
                        path.unlink()
                self._reports.append(partial(self._lost, key, Trouble.DAMAGED, error))
                continue
            except FileNotFoundError as error:
                self._reports.append(partial(self._lost, key, Trouble.MISSING, error))
                return
            except OSError as error:
                self.report_failure(Direction.READ, error)
                return
            transfer.done.add(key)
            transfer.progress_s = self._clock.now_s()

    def report_failure(self, direction: Direction, error: Exception | None) -> None:
        """Report a failure of the volume. None: all slots are in use."""
        number = error.errno if isinstance(error, OSError) else None
        trouble = Trouble.NO_SLOT if error is None else TROUBLE_OF_ERRNO.get(number or 0, Trouble.IO_ERROR)
        self._reports.append(partial(self._stop, direction, trouble, error))

    def _opened(self, direct: bool, keys: Sequence[bytes] | None) -> None:
        """Report the opened volume.

        Args:
            direct: whether direct I/O works.
            keys: the chunks in the slot, the one used longest ago first. None: only reads work yet.
        """
        self._reports.append(partial(self._begin_use, direct, keys))

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def take_reports(self) -> None:
        """Process what the threads have reported."""
        while self._reports:
            self._reports.popleft()()

    def _begin_use(self, direct: bool, keys: Sequence[bytes] | None) -> None:
        self._files, self._open = self._make_files(direct), True
        if keys is not None:
            self.chunks.clear()
            self._copies.clear()
            self.chunks.storing = None
            for key in keys:
                status = ChunkStatus(0)
                status.ref_cnt = 0
                self.chunks.insert(OffloadKey(key), status)
            for key in list(self.chunks.blocks)[: max(0, len(keys) - self.chunks.cache_capacity)]:
                self._delete(key)
            self._writes = True
            self._works(Direction.WRITE)
            logger.info("Disk tier: slot %s of %s with %d chunks", self._slots.own, self._slots.folder, len(keys))

    def _begin(self, direction: Direction, job: TransferJob) -> Transfer:
        transfer = Transfer(direction, list(job.keys), self._clock.now_s())
        self._transfers[job.job_id] = transfer
        return transfer

    def _parts(self, job: TransferJob, number: int) -> list[list[tuple[int, OffloadKey, int]]]:
        """Divide a job's chunks, with their indices and rows, among threads. Each gets consecutive ones."""
        chunks = [(index, key, int(row)) for index, (key, row) in enumerate(zip(job.keys, job_rows(job), strict=True))]
        size = max(1, -(-len(chunks) // number))
        return [chunks[begin : begin + size] for begin in range(0, len(chunks), size)]

    def _count(self, transfer: Transfer) -> None:
        chunks = len(transfer.done) - len(transfer.linked)
        if not chunks:
            return
        self.bytes[transfer.direction] += chunks * self.chunk_bytes
        self.seconds[transfer.direction] += transfer.seconds
        speed = self.read_speed if transfer.direction is Direction.READ else self.write_speed
        speed.measure(chunks, transfer.seconds)
        if len(transfer.done) == len(transfer.keys):
            self._works(transfer.direction)

    def _written(self, transfer: Transfer) -> None:
        for key in transfer.keys:
            status = self.chunks.blocks.get(key)
            if status is None:
                continue
            if key not in transfer.done:
                self.chunks.remove(key)
                self._forgotten.discard(key)
                continue
            status.ref_cnt = 0
            if key in self._forgotten:
                self._forgotten.discard(key)
                self._delete(key)
        if transfer.copy is not None and len(transfer.done) == len(transfer.keys):
            program, chunks = transfer.copy
            if program in self.chunks.accounts:
                self.has_all(program, chunks)

    def _delete(self, key: OffloadKey) -> None:
        self.chunks.remove(key)
        if self._slots.own is not None:
            self._janitor.delete(self._slots.own_file(key))

    def _lost(self, key: OffloadKey, trouble: Trouble, error: Exception) -> None:
        self.troubles[trouble] += 1
        status = self.chunks.blocks.get(key)
        if status is not None and status.ref_cnt == 0:
            self.chunks.remove(key)
        logger.warning("Disk tier: a chunk is %s and is computed again: %s", trouble, error)

    def _is_stopped(self, direction: Direction) -> bool:
        stopped = self._stopped.get(direction)
        return stopped is not None and self._clock.now_s() < stopped[1]

    def _stop(self, direction: Direction, trouble: Trouble, error: Exception | None) -> None:
        before = self._stopped.get(direction)
        self.troubles[trouble] += 1
        self._stopped[direction] = (trouble, self._clock.now_s() + RETRY_S)
        if trouble is Trouble.GONE and direction is Direction.WRITE and self._writes:
            self._writes = False
            self.chunks.clear()
            self._copies.clear()
            self._victims.clear()
            self._janitor.reopen()
        if before is None or before[0] is not trouble:
            logger.warning("Disk tier degraded: %s (%s), %s; the replica serves without", trouble, direction, error)

    def _works(self, direction: Direction) -> None:
        if self._stopped.pop(direction, None) is not None:
            logger.warning("Disk tier: %s works again", direction)

    def _find_stalled(self) -> None:
        """Stop a direction with a transfer whose threads hang, or which gets no thread because all of them hang."""
        now_s = self._clock.now_s()
        begun = [transfer for transfer in self._transfers.values() if transfer.threads]
        self._progress_s = max([self._progress_s, *(transfer.progress_s for transfer in begun)])
        for transfer in self._transfers.values():
            progress_s = transfer.progress_s if transfer.threads else max(transfer.progress_s, self._progress_s)
            if now_s - progress_s > STALL_S and not self._is_stopped(transfer.direction):
                self._stop(transfer.direction, Trouble.STALLED, None)

    def _row(self, row: int) -> memoryview:
        return self._flat[row * self.chunk_bytes : (row + 1) * self.chunk_bytes]

    def _name_in_file(self, key: OffloadKey) -> bytes:
        return bytes(key) + self._slots.generation.encode()


def _touched(path: Path) -> bool:
    """Mark a file as used now. Return False if there is none."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


class SlotLookup(AsyncLookupManager):
    """Looks chunks up in the slots, in a thread."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        super().__init__(tier_type="disk")

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return for each key whether a slot has it."""
        try:
            return [self._tier.has(key) for key in keys]
        except OSError as error:
            self._tier.report_failure(Direction.READ, error)
            return [False] * len(keys)

    def drain_results(self) -> None:
        """Take the answers that have come. A chunk may have several, of which the first one counts.

        Where the request that asked has ended, vLLM forgets the lookup although its answer is outstanding. The next
        request asks again. The method of vLLM 0.29 fails at the second answer.
        """
        if DRAINS_LATE_LOOKUPS:
            super().drain_results()
            return
        while not self._pending_results.empty():
            for key, found in self._pending_results.get():
                state = self._lookup_state.get(key)
                if state is not None and state.result is None:
                    state.result = found

    def shutdown(self) -> None:
        """End the thread, if it does not hang."""
        self._lookup_queue.put(None)
        self._thread.join(END_S)
