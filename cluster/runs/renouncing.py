"""Undoes a run or a batch that the store may have accepted, although the store did not answer or the client left."""

import asyncio

from cluster.core.errors import RunStoreUnavailable
from cluster.store.runs.store import RunStore

RENOUNCE_S = 0.2
"""Seconds between two attempts."""


async def until_renounced(store: RunStore, run_id: str, *, although_repeated: bool = False) -> None:
    """Undo the creation of a run as soon as the store answers. The arguments are those of `RunStore.renounce`."""
    while True:
        await asyncio.sleep(RENOUNCE_S)
        try:
            await store.renounce(run_id, although_repeated=although_repeated)
            return
        except RunStoreUnavailable:
            continue
