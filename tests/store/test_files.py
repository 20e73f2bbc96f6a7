"""Files of a tenant that are more than a page of the store's list."""

import pytest

from cluster.core.clock import ManualClock
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store import files
from cluster.store.files import FileStore, StoredFile
from tests.store.conftest import PATIENT_S


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
