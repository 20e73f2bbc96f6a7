"""The disk tier without an engine: files, slots, the bound, and what is worth being written."""

import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from cluster.core.clock import Clock, ManualClock, MonotonicClock
from cluster.core.errors import ConfigError
from replicas.disk_tier import slots as slots_module
from replicas.disk_tier.chunk_file import PAGE, ChunkFiles, DamagedChunkError, file_bytes
from replicas.disk_tier.identity import weights_identity
from replicas.disk_tier.slots import STALE_S, Slots
from replicas.disk_tier.tier import READERS, STALL_S, WRITERS, DiskTier
from replicas.disk_tier.trouble import Direction
from replicas.disk_tier.value import Speed, WriteOutcome, disk_standing, host_standing, refusal
from replicas.host_tier import Standing
from replicas.vllm_versions import COUNTS_CHUNKS, DRAINS_LATE_LOOKUPS
from tests.waiting import wait_until

CHUNK_BYTES = PAGE
LINK_S = 1e-5
KEY = b"k" * 36


def standing(pause_s: float = 10.0, computed_s: float = 1e-3, *, returns: bool = True) -> Standing:
    return Standing(False, 0.0, pause_s, 0.0, computed_s, LINK_S, returns)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 500, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 4, CHUNK_BYTES + 16])
def test_each_flipped_bit_of_a_file_is_recognised(tmp_path: Path, place: int) -> None:
    files, path = ChunkFiles(direct=False), tmp_path / "a" / "x.kv"
    files.write(path, KEY, memoryview(bytes(range(256)) * (CHUNK_BYTES // 256)))
    into = memoryview(bytearray(CHUNK_BYTES))
    files.read(path, KEY, into)
    assert into == bytes(range(256)) * (CHUNK_BYTES // 256)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedChunkError):
        files.read(path, KEY, into)


def test_a_file_of_another_chunk_or_size_is_recognised(tmp_path: Path) -> None:
    files, path = ChunkFiles(direct=False), tmp_path / "a" / "x.kv"
    files.write(path, KEY, memoryview(bytes(CHUNK_BYTES)))
    with pytest.raises(DamagedChunkError, match="not the file"):
        files.read(path, b"j" * 36, memoryview(bytearray(CHUNK_BYTES)))
    with pytest.raises(DamagedChunkError):
        files.read(path, KEY, memoryview(bytearray(2 * CHUNK_BYTES)))
    with pytest.raises(DamagedChunkError):
        files.read(path, KEY, memoryview(bytearray(CHUNK_BYTES // 2)))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    files, path = ChunkFiles(direct=False), tmp_path / "a" / "x.kv"
    path.mkdir(parents=True)
    with pytest.raises(OSError, match=r"x\.kv"):
        files.write(path, KEY, memoryview(bytes(CHUNK_BYTES)))
    assert list((tmp_path / "a").iterdir()) == [path]


# --- slots ------------------------------------------------------------------------------------------------------------


def test_each_replica_has_a_slot_and_reads_all(tmp_path: Path) -> None:
    one, two, three = (Slots(tmp_path / "kv", "model", 2) for _ in range(3))
    assert one.take(create=True)
    assert two.take(create=False)
    assert not three.take(create=False), "one more than there are slots, as in a rolling update"
    ChunkFiles(direct=False).write(one.own_file(KEY), KEY, memoryview(bytes(CHUNK_BYTES)))
    assert two.find(KEY) == three.find(KEY) == one.own_file(KEY)
    assert one.volume == two.volume == three.volume != ""
    elsewhere = Slots(tmp_path / "another folder", "model", 2)
    assert elsewhere.take(create=True)
    assert elsewhere.volume != one.volume
    one.release()
    assert three.take(create=False)
    assert three.scan(file_bytes(CHUNK_BYTES)) == [KEY], "it takes over what the replica before has left"


def test_what_is_torn_or_old_is_deleted_when_a_slot_is_taken_over(tmp_path: Path) -> None:
    slots, files = Slots(tmp_path, "model", 1), ChunkFiles(direct=False)
    assert slots.take(create=True)
    keys = [bytes([number]) * 36 for number in range(4)]
    for key in keys:
        files.write(slots.own_file(key), key, memoryview(bytes(CHUNK_BYTES)))
    slots.own_file(keys[0]).write_bytes(b"torn")
    os.utime(slots.own_file(keys[1]), (1.0, 1.0))
    slots.own_file(keys[2]).with_suffix(".kv.12-3.tmp").write_bytes(b"half")
    os.utime(slots.own_file(keys[2]), (2e9, 2e9))
    assert slots.scan(file_bytes(CHUNK_BYTES)) == [keys[3], keys[2]], "the one used longest ago first"
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file() and file.suffix) == sorted(
        map(slots.own_file, keys[2:])
    )


def test_folders_that_nobody_uses_are_deleted_after_a_day_and_no_others(tmp_path: Path) -> None:
    old, used, fresh, own = (Slots(tmp_path, name, 1) for name in ("old", "used", "fresh", "own"))
    for slots in (old, used, fresh, own):
        assert slots.take(create=True)
    (tmp_path / "theirs").mkdir()
    old.release()
    fresh.release()
    for slots in (old, used):
        for path in (slots.folder / "slot-0", slots.folder / "slot-0" / "lock"):
            os.utime(path, (path.stat().st_mtime - 2 * STALE_S,) * 2)
    assert own.remove_stale() == ["old"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["fresh", "own", "theirs", "used"]


def test_a_folder_that_cannot_be_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lost+found` of a volume, which belongs to root."""
    own, lost = Slots(tmp_path, "own", 1), tmp_path / "lost+found"
    lost.mkdir()
    assert own.take(create=True)
    iterdir = Path.iterdir

    def denied(path: Path) -> Iterator[Path]:
        if path == lost:
            raise PermissionError(errno.EACCES, "denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", denied)
    assert own.remove_stale() == []


def test_a_folder_that_two_replicas_delete_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, own = Slots(tmp_path, "old", 1), Slots(tmp_path, "own", 1)
    assert old.take(create=True) and own.take(create=True)
    old.release()
    last_use_s = slots_module._last_use_s

    def after_the_other(folder: Path) -> float:
        shutil.rmtree(folder)
        return last_use_s(folder)

    monkeypatch.setattr(slots_module, "_last_use_s", after_the_other)
    assert own.remove_stale() == []


def test_a_slot_that_is_deleted_while_it_is_taken_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, flock = Slots(tmp_path, "model", 1), fcntl.flock

    def after_a_deletion(descriptor: int, operation: int) -> None:
        lock = slots.folder / "slot-0" / "lock"
        lock.unlink()
        lock.touch()  # by the replica that takes it next
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", after_a_deletion)
        with pytest.raises(FileNotFoundError):
            slots.take(create=True)
    assert slots.own is None
    assert slots.take(create=False)


def test_nobody_takes_a_slot_that_is_being_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, own = Slots(tmp_path, "old", 1), Slots(tmp_path, "own", 1)
    assert old.take(create=True) and own.take(create=True)
    old.release()
    for path in (old.folder / "slot-0", old.folder / "slot-0" / "lock"):
        os.utime(path, (path.stat().st_mtime - 2 * STALE_S,) * 2)
    taken: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: taken.append(old.take(create=False)))
    own.remove_stale()
    assert taken == [False]


# --- the bound --------------------------------------------------------------------------------------------------------


def job(number: int, keys: list[OffloadKey]) -> TransferJob:
    rows = {"chunk_ids" if COUNTS_CHUNKS else "block_ids": np.arange(len(keys))}
    values: dict[str, Any] = {"job_id": number, "keys": keys, "is_promotion": False, "req_context": ReqContext("r")}
    return TransferJob(**values, **rows)


@contextmanager
def tier_on(
    path: Path, clock: Clock, files: Callable[[bool], ChunkFiles] = ChunkFiles, chunks: int = 10
) -> Iterator[DiskTier]:
    """A tier with room for so many chunks."""
    rows = memoryview(np.frombuffer(mmap.mmap(-1, 16 * CHUNK_BYTES), dtype=np.int8).reshape(16, CHUNK_BYTES))
    spec: Any = SimpleNamespace()
    made = DiskTier(
        spec,
        rows,
        chunk_tokens=16,
        slots=Slots(path, "model", 2),
        capacity_bytes=2 * chunks * file_bytes(CHUNK_BYTES),
        clock=clock,
        files=files,
    )
    made._janitor.wait()
    made.take_reports()
    assert made.writable
    yield made
    made.chunks.check_integrity()
    made.shutdown()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier with room for ten chunks."""
    with tier_on(tmp_path, MonotonicClock()) as made:
        yield made


def context(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32), 0) for i in range(count)]


def write(tier: DiskTier, number: int, program: str, count: int, saved_s: float, pause_s: float = 10.0) -> int:
    keys = tier.reserve(program, Standing(False, saved_s, pause_s, 0.0), [context(program, count)])
    if keys:
        tier.submit_store(job(number, keys))
        tier.drain_jobs()
        assert [result.job_id for result in tier.get_finished_jobs()] == [number]
    return len(keys)


def stored(tmp_path: Path) -> int:
    return len(list(tmp_path.rglob("*.kv")))


def test_the_program_of_least_worth_is_evicted_and_the_bound_is_kept(tier: DiskTier, tmp_path: Path) -> None:
    assert write(tier, 1, "cheap", 6, saved_s=1.0) == 6
    assert write(tier, 2, "dear", 6, saved_s=2.0) == 6
    assert stored(tmp_path) == 10
    assert tier.chunks.leading(tier.chunks.accounts["cheap"]) == 4, "its last chunks were evicted"
    assert write(tier, 3, "cheaper", 3, saved_s=0.5) == 0, "nothing of more worth is evicted for it"
    assert stored(tmp_path) == 10


def test_what_another_slot_has_gets_a_second_name_and_outlives_the_first(tier: DiskTier, tmp_path: Path) -> None:
    """A program that has moved here has all of its context in this slot after its next pause, though 4 of 6 chunks were
    written by the replica before, which deletes its own files then.
    """
    other, files = Slots(tmp_path, "model", 2), ChunkFiles(direct=False)
    assert other.take(create=False)
    for key in context("p", 4):
        files.write(other.own_file(key), tier._name_in_file(key), memoryview(bytes(CHUNK_BYTES)))
    keys = tier.reserve("p", Standing(False, 1.0, 10.0, 0.0), [context("p", 6)])
    tier.submit_store(job(1, keys))
    tier.writes_copy(1, "p", 6)
    assert tier.chunks_of("p") == 0, "not before it is written"
    tier.drain_jobs()
    list(tier.get_finished_jobs())
    assert tier.bytes == {Direction.WRITE: 2 * CHUNK_BYTES}, "4 chunks have only got a name"
    for key in context("p", 4):
        other.own_file(key).unlink()
    assert all(tier.has(key) for key in context("p", 6))
    assert tier.chunks_of("p") == 6
    assert tier.take_written() == ["p"]
    write(tier, 2, "dear", 6, saved_s=9.0)
    assert tier.chunks_of("p") == 4, "its last chunks have made room"
    tier.disown("p")
    assert tier.chunks_of("p") == 0
    other.release()


def test_a_program_that_goes_on_writes_only_what_is_new(tier: DiskTier, tmp_path: Path) -> None:
    assert write(tier, 1, "p", 3, saved_s=1.0) == 3
    assert write(tier, 2, "p", 5, saved_s=1.0) == 2
    tier.forget("p")
    tier._janitor.wait()
    assert stored(tmp_path) == 0


def test_a_program_that_ends_while_it_is_written_is_deleted_afterwards(tier: DiskTier, tmp_path: Path) -> None:
    keys = tier.reserve("p", Standing(False, 1.0, 10.0, 0.0), [context("p", 4)])
    tier.submit_store(job(1, keys))
    tier.forget("p")
    tier.drain_jobs()
    list(tier.get_finished_jobs())
    tier._janitor.wait()
    assert stored(tmp_path) == 0
    assert not tier.chunks.blocks


def test_what_another_program_has_too_is_kept_when_the_first_one_ends_while_it_is_written(
    tier: DiskTier, tmp_path: Path
) -> None:
    keys = tier.reserve("ends", Standing(False, 1.0, 10.0, 0.0), [context("p", 4)])
    tier.submit_store(job(1, keys))
    tier.forget("ends")
    assert not tier.reserve("p", Standing(False, 1.0, 10.0, 0.0), [context("p", 4)])
    tier.drain_jobs()
    list(tier.get_finished_jobs())
    tier._janitor.wait()
    assert stored(tmp_path) == 4
    assert tier.chunks.leading(tier.chunks.accounts["p"]) == 4


def test_a_volume_has_no_name_once_the_files_are_for_this_process_only(tier: DiskTier) -> None:
    assert tier.volume
    tier.reset()
    assert tier.readable and not tier.volume


def test_a_file_whose_deletion_is_outstanding_may_be_written_again(tier: DiskTier, tmp_path: Path) -> None:
    busy = threading.Event()
    write(tier, 1, "ends", 4, saved_s=1.0)
    tier._janitor._tasks.put(busy.wait)
    tier.forget("ends")
    keys = tier.reserve("p", Standing(False, 1.0, 10.0, 0.0), [context("ends", 4)])
    tier.submit_store(job(2, keys))
    tier.drain_jobs()
    list(tier.get_finished_jobs())
    busy.set()
    tier._janitor.wait()
    assert stored(tmp_path) == 4
    assert all(map(tier.has, keys))


def test_what_makes_room_for_one_program_may_be_written_for_another_before(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads write, so that the write that makes room may be the later one."""
    write(tier, 1, "cheap", 8, saved_s=1.0)
    queued: list[Callable[[], None]] = []
    monkeypatch.setattr(tier._pool, "enqueue_store", lambda number, parts, tasks: queued.append(tasks))
    evicted = context("cheap", 8)[4:]
    for number, (program, keys) in enumerate([("dear", context("dear", 6)), ("p", evicted)], 2):
        accepted = tier.reserve(program, Standing(False, 2.0 + number, 10.0, 0.0), [keys])
        assert accepted == keys
        tier.submit_store(job(number, accepted))
    for task in [*queued[1], *queued[0]]:  # type: ignore[misc]
        task()
    assert all(map(tier.has, evicted))


def test_a_file_that_vanishes_while_it_is_marked_as_used_is_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    [key] = keys = tier.reserve("p", Standing(False, 1.0, 10.0, 0.0), [context("p", 1)])
    find = tier._slots.find
    monkeypatch.setattr(tier._slots, "find", tier._slots.own_file)
    tier.submit_store(job(1, keys))
    tier.drain_jobs()
    list(tier.get_finished_jobs())
    assert tier.writable
    assert find(key) is not None


# --- a volume that is slow --------------------------------------------------------------------------------------------


THREADS = READERS + WRITERS


class Slow:
    """A volume on which each thread writes one chunk whenever the test says so, and its clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tier: DiskTier
        self._turn = threading.Condition()
        self._round = 0
        self._begun: Counter[int] = Counter()
        """Number of writes that began in each round."""
        self._ended = False

    def files(self, direct: bool) -> ChunkFiles:
        files = ChunkFiles(direct)
        files.write = self._write  # type: ignore[method-assign]
        return files

    def _write(self, path: Path, key: bytes, chunk: memoryview) -> None:
        with self._turn:
            began = self._round
            self._begun[began] += 1
            self._turn.wait_for(lambda: self._ended or (self._round > began and b"hung" not in key))

    def submit(self, *names: str) -> None:
        """Submit the write of a context of eight chunks for each name. Two threads divide it."""
        for name in names:
            keys = self.tier.reserve(name, Standing(False, 1.0, 10.0, 0.0), [context(name, 8)])
            self.tier.submit_store(job(len(self.tier._transfers), keys))
        wait_until(lambda: self._begun[0] == THREADS)

    def after(self, seconds: float, writes: int) -> list[str]:
        """Let time pass, and so many threads write a chunk then. Return what is wrong."""
        self.clock.advance(seconds)
        if writes:
            with self._turn:
                self._round += 1
                self._turn.notify_all()
            wait_until(lambda: self._begun[self._round] == writes)
        list(self.tier.get_finished_jobs())
        return [str(trouble) for trouble, _ in self.tier._stopped.values()]

    def end(self) -> None:
        with self._turn:
            self._ended = True
            self._turn.notify_all()
        self.tier.drain_jobs()
        list(self.tier.get_finished_jobs())


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    made = Slow()
    with tier_on(tmp_path, made.clock, made.files, chunks=100) as made.tier:
        yield made
        made.end()


def test_a_write_that_waits_for_the_threads_of_a_slow_volume_does_not_stall(slow: Slow) -> None:
    slow.submit("a", "b", "c", "waits")
    for _ in range(3):
        assert slow.after(STALL_S / 2, writes=THREADS) == []
    *_, waiting = slow.tier._transfers.values()
    assert not waiting.threads and not waiting.done
    assert slow.tier.writable


def test_a_write_that_follows_one_that_has_just_ended_does_not_stall(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread has begun it yet."""
    queued: list[Callable[[], None]] = []
    pool = slow.tier._pool
    monkeypatch.setattr(pool, "enqueue_store", lambda number, parts, tasks: queued.extend(tasks))
    monkeypatch.setattr(pool, "get_finished", lambda: [(1, True, 0.0)])
    monkeypatch.setattr(slow.tier, "_files", ChunkFiles(direct=False))
    for number, name in enumerate("ab", 1):
        slow.tier.submit_store(job(number, context(name, 1)))
    slow.clock.advance(STALL_S + 1.0)
    queued[0]()
    assert [result.job_id for result in slow.tier.get_finished_jobs()] == [1]
    assert slow.tier.in_use and slow.tier.writable


def test_a_write_that_hangs_stalls_though_others_go_on(slow: Slow) -> None:
    slow.submit("hung", "a", "b", "waits")
    assert slow.after(STALL_S, writes=THREADS - 2) == []
    assert slow.after(1.0, writes=THREADS - 2) == ["stalled"]
    assert slow.tier.readable and not slow.tier.writable


def test_where_all_threads_hang_both_directions_stall(slow: Slow) -> None:
    slow.submit("a", "b", "c", "waits")
    slow.tier.submit_load(job(9, context("r", 4)))
    assert slow.after(STALL_S, writes=THREADS) == []
    assert slow.after(STALL_S, writes=0) == []
    assert slow.after(1.0, writes=0) == ["stalled", "stalled"]
    assert not slow.tier.readable and not slow.tier.writable


def test_a_lookup_that_was_given_up_and_is_repeated_may_be_answered_twice(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    [key] = context("p", 1)
    write(tier, 1, "p", 1, saved_s=1.0)
    find = tier._slots.find

    def hanging(key: bytes) -> Path | None:
        answers.wait(20.0)
        return find(key)

    monkeypatch.setattr(tier._slots, "find", hanging)
    for request in ("fetch", "turn"):
        assert tier.lookup(key, ReqContext(request)) is LookupResult.RETRY
        tier._lookups.flush()
        if request == "fetch":
            tier.on_request_finished(ReqContext(request))
    answers.set()
    expected = 1 if DRAINS_LATE_LOOKUPS else 2  # vLLM 0.32 does not ask again while an answer is outstanding
    wait_until(lambda: tier._lookups._pending_results.qsize() == expected)
    assert tier.lookup(key, ReqContext("turn")) is LookupResult.HIT


# --- the value --------------------------------------------------------------------------------------------------------


def test_what_is_written() -> None:
    at_1_ms = disk_standing(standing(), read_s=1e-3 / 16)
    assert at_1_ms.saved_s == pytest.approx(1e-3 - 1e-3 / 16 - LINK_S)
    assert refusal(at_1_ms, write_s=9.0) is None
    assert refusal(at_1_ms, write_s=11.0) is WriteOutcome.SHORT_PAUSE
    assert refusal(at_1_ms, write_s=11.0, leaving=True) is None, "another replica will look for it"
    slow = disk_standing(standing(), read_s=17e-3 / 16)
    assert refusal(slow, write_s=1.0) is WriteOutcome.NO_GAIN
    last = disk_standing(standing(returns=False), read_s=1e-3 / 16)
    assert refusal(last, write_s=1.0, leaving=True) is WriteOutcome.LAST_TURN


def test_on_the_host_a_copy_is_worth_less_if_it_is_on_disk_too() -> None:
    alone = replace(standing(), saved_s=1e-3 - LINK_S)
    assert host_standing(alone, read_s=2e-4).saved_s == pytest.approx(2e-4), "the read that it saves"
    assert host_standing(alone, read_s=5e-3).saved_s == pytest.approx(1e-3 - LINK_S), "computing is faster than reading"
    assert host_standing(replace(alone, saved_s=0.0), read_s=2e-4).saved_s == 0, "the program does not come back"


def test_a_speed_follows_what_is_measured() -> None:
    speed = Speed(1.0)
    speed.measure(64, 6.4)
    assert speed.chunk_s == pytest.approx(0.55)
    speed.measure(1, 0.55)
    assert speed.chunk_s == pytest.approx(0.55)


def test_weights_are_told_apart_by_samples(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    before = weights_identity(tmp_path, None)
    assert weights_identity(tmp_path, None) == before
    with weights.open("r+b") as file:
        file.seek((1 << 20) - 10)
        file.write(b"trained")
    assert weights_identity(tmp_path, None) != before
    assert weights_identity(Path("org/model"), "abc") == "org/model@abc"
    with pytest.raises(ConfigError, match=r"replicas\.disk_tier"):
        weights_identity(Path("org/model"), None)


def test_weights_that_differ_in_one_kind_of_tensor_differ(tmp_path: Path) -> None:
    """A merged adapter changes these tensors only. They are between the parts of the file that are compared."""
    weights = {f"layers.{layer}.mlp": torch.zeros(300_000) for layer in range(7)} | {"norm": torch.zeros(300_000)}
    weights |= {f"layers.{layer}.q": torch.zeros(500) for layer in range(7)}
    save_file(weights, tmp_path / "model.safetensors")
    before = weights_identity(tmp_path, None)
    weights |= {f"layers.{layer}.q": torch.ones(500) for layer in range(7)}
    save_file(weights, tmp_path / "model.safetensors")
    assert weights_identity(tmp_path, None) != before


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 100, b'\x0b\0\0\0\0\0\0\0{"a":{"b":1}}'])
def test_a_file_that_is_no_safetensors_file_has_an_identity(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_identity(tmp_path, None) != weights_identity(tmp_path / "..", None)
