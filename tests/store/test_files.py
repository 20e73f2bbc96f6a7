"""Files of a tenant that are more than a page of the store's list, that are damaged, or that nobody completed."""

import asyncio
from collections.abc import Iterator

import pytest
import redis.asyncio

from cluster.core.clock import ManualClock
from cluster.core.errors import RunLeaseLost
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store import files
from cluster.store.files import FileStore, StoredFile
from tests.store.conftest import PATIENT_S
from tests.waiting import POLL_S


async def test_files_beyond_a_page_are_listed_and_count(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LISTED", 3)
    store = FileStore(server.url, owner="a", timeout_s=PATIENT_S, clock=ManualClock())
    for number in range(7):
        file = StoredFile(f"file-{number}", "tenant", "in.jsonl", "batch", 10, created_s=0.0, expires_s=3600.0)
        await store.write(file, [b"0123456789"])
    assert [file.id for file in await store.listed("tenant")] == [f"file-{number}" for number in range(6, -1, -1)]
    assert await store.reserved_bytes("tenant") == (7, 70)
    assert await store.listed("another") == []
    await store.close()


async def test_files_behind_a_page_of_damaged_ones_are_listed_and_count(
    server: EmbeddedRedis, direct: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LISTED", 3)
    store = FileStore(server.url, owner="a", timeout_s=PATIENT_S, clock=ManualClock())
    for number in range(9):
        file = StoredFile(f"file-{number}", "tenant", "in.jsonl", "batch", 10, created_s=0.0, expires_s=3600.0)
        await store.write(file, [b"0123456789"])
    for number in (1, 2, 3, 4, 5, 8):
        await direct.hset(f"caesura:v1:{{files}}:run:file-{number}", "labels", "no JSON")
    assert [file.id for file in await store.listed("tenant")] == ["file-7", "file-6", "file-0"]
    assert await store.reserved_bytes("tenant") == (3, 30)
    await store.close()


async def test_a_file_that_was_swept_incomplete_can_be_written_again_and_a_deleted_one_cannot(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch writes its input again where the store has lost it. The ingress that began to do so may have ended."""
    monkeypatch.setattr(files, "LEASE_S", 0.001)
    ending, other = (
        FileStore(server.url, owner=owner, timeout_s=PATIENT_S, clock=ManualClock()) for owner in ("a", "b")
    )
    file = StoredFile("file-1", "tenant", "in.jsonl", "batch", 10, created_s=0.0, expires_s=3600.0)

    def cut_short() -> Iterator[bytes]:
        yield b"01234"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await ending.write(file, cut_short())
    await asyncio.sleep(POLL_S)  # longer than the lease
    assert await other.sweep() == 1
    await other.write(file, [b"0123456789"])
    assert [one.id for one in await ending.listed("tenant")] == ["file-1"]
    assert await other.delete("file-1")
    with pytest.raises(RunLeaseLost):
        await ending.write(file, [b"0123456789"])
    await ending.close()
    await other.close()
