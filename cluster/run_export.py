"""The logs of a tenant's runs, read out of the store as traces."""

from collections.abc import AsyncIterator

from cluster.run_events import decode
from cluster.run_store import RunStore
from cluster.run_traces import RunTrace, run_trace

PAGE = 100
"""Runs asked for at a time."""


async def exported(store: RunStore, tenant: str, source: str) -> AsyncIterator[RunTrace]:
    """Of closed runs, the newest first; what was forgotten meanwhile, or cannot be read, is left out.

    Raises:
        RunStoreUnavailable: the store does not answer.
    """
    before: float | None = None
    while heads := await store.runs(tenant, limit=PAGE, before=before):
        for head in heads:
            if not head.open and (trace := await _trace(store, head.id, source)) is not None:
                yield trace
        before = heads[-1].created_s


async def _trace(store: RunStore, run_id: str, source: str) -> RunTrace | None:
    entries: list[bytes] = []
    while (log := await store.read(run_id, len(entries))) is not None:
        entries += log.items
        if not log.more:
            break
    try:
        return run_trace([decode(entry) for entry in entries], source)
    except ValueError:
        return None
