"""The files of tenants in Redis. A file is a log of pieces, which is closed when all of them are written.

A file that its ingress did not complete is never visible. Any ingress deletes it when its lease has ended.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from cluster.core.clock import Clock
from cluster.core.errors import RunLeaseLost, RunLogGap, RunOpen, RunStoreUnavailable, RunUnknown
from cluster.store.runs.records import LogKind, NewRun, RunHead
from cluster.store.runs.store import MAX_LISTED, RunStore

LEASE_S = 60.0
"""Seconds within which an ingress writes the next pieces of a file."""
RENEW_PIECES = 32
"""Number of pieces after which the lease is renewed."""
ATTEMPTS = 4
"""Number of times that the write of a piece is tried."""
SWEPT_AT_ONCE = 16

_WRITING, _WRITTEN = "writing", "written"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file without its content."""

    id: str
    tenant: str
    name: str
    purpose: str
    bytes: int
    """Size of the content as the client sent or receives it."""
    created_s: float
    expires_s: float
    """Unix times in seconds."""


class FileStore:
    """Access to the files of all tenants.

    Every method may raise `RunStoreUnavailable`. It is then unknown whether something was written.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        owner: this process's name, which must be unique and never be used again.
        timeout_s: timeout of each call in seconds.
        clock: measures how long the store was unavailable.
    """

    def __init__(self, url: str, *, owner: str, timeout_s: float, clock: Clock) -> None:
        self._logs = RunStore(
            url, owner=owner, timeout_s=timeout_s, lease_s=LEASE_S, retention_s=1.0, clock=clock, kind=LogKind.FILES
        )
        self._writing: set[str] = set()

    async def write(
        self, file: StoredFile, pieces: Iterable[bytes], check: Callable[[int, int], object] | None = None
    ) -> None:
        """Store a new file. Nobody sees it before all of it is stored.

        Args:
            file: the file. Its ``expires_s`` decides when it is deleted.
            pieces: its content, in pieces that `pieces` returns again as they are.
            check: called with the number and the bytes of the tenant's files once this one and those that are written
                at the same time count. If it raises, nothing is stored, and the error is passed on.

        Raises:
            RunLeaseLost: another process has a file of this id.
        """
        labels = {"name": file.name, "bytes": str(file.bytes), "expires": repr(file.expires_s)}
        run = NewRun(file.id, file.tenant, file.purpose, labels, status=_WRITING)
        self._writing.add(file.id)
        try:
            await self._repeated(lambda: self._logs.create(run, [b""]))
            if check is not None:
                await self._checked(file, check)
            written = 1
            for piece in pieces:
                await self._append(file.id, written, piece)
                written += 1
                if written % RENEW_PIECES == 0:
                    await self._repeated(lambda: self._logs.renew([file.id]))
            kept_s = max(1.0, file.expires_s - file.created_s)
            await self._repeated(
                lambda: self._logs.append(file.id, written, [], status=_WRITTEN, final=True, retention_s=kept_s)
            )
        finally:
            self._writing.discard(file.id)

    async def _checked(self, file: StoredFile, check: Callable[[int, int], object]) -> None:
        try:
            check(*await self.reserved_bytes(file.tenant))
        except BaseException:
            await self._discard(file.id, 1)
            raise

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """Return a file, or None if the tenant has none of this id."""
        page = await self._logs.read(file_id, 0, 0)
        return None if page is None or page.head.tenant != tenant else _visible(page.head)

    async def listed(self, tenant: str) -> list[StoredFile]:
        """Return all files of a tenant, the newest first."""
        return [file for head in await self._heads(tenant) if (file := _visible(head)) is not None]

    async def reserved_bytes(self, tenant: str) -> tuple[int, int]:
        """Return the number and the bytes of a tenant's files, with those that are being written."""
        heads = await self._heads(tenant)
        return len(heads), sum(int(head.labels.get("bytes", "0")) for head in heads)

    async def pieces(self, file_id: str) -> AsyncIterator[bytes]:
        """Yield the pieces of a file.

        Raises:
            RunUnknown: there is no such file, or it has expired meanwhile.
        """
        place = 1
        while True:
            page = await self._logs.read(file_id, place)
            if page is None:
                raise RunUnknown(f"file {file_id} is not in the store")
            for piece in page.items:
                yield piece
            place = page.end
            if not page.more:
                return

    async def delete(self, file_id: str) -> bool:
        """Delete a complete file. Return False if there is none."""
        try:
            return await self._logs.delete(file_id)
        except RunOpen:
            return False

    async def sweep(self) -> int:
        """Delete files that nobody completes. Return their number."""
        claimed = await self._logs.claim(SWEPT_AT_ONCE, self._writing)
        for file_id in claimed:
            page = await self._logs.read(file_id, 0, 0)
            if page is not None:
                await self._discard(file_id, page.length)
        return len(claimed)

    async def close(self) -> None:
        """Close the connections to the store. Files that are being written stay incomplete, and are swept later."""
        await self._logs.close()

    async def _discard(self, file_id: str, length: int) -> None:
        """Delete a file that is not complete. ``length``: entries of its log.

        It may be written again at once: a batch does so with its input, where the store has lost it.
        """
        await self._logs.append(file_id, length, [], final=True)
        await self._logs.delete(file_id, may_return=True)

    async def _heads(self, tenant: str) -> list[RunHead]:
        """Return all files of a tenant, the newest first, with those that are not complete."""
        heads: list[RunHead] = []
        while page := await self._logs.runs(tenant, limit=MAX_LISTED, before=heads[-1].created_s if heads else None):
            heads += page
        return heads

    async def _append(self, file_id: str, place: int, piece: bytes) -> None:
        await self._repeated(lambda: self._logs.append(file_id, place, [piece]))

    async def _repeated(self, call: Callable[[], Awaitable[object]]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await call()
                return
            except RunStoreUnavailable:
                if attempt == ATTEMPTS:
                    raise
            except (RunUnknown, RunLogGap) as error:
                raise RunLeaseLost(f"the store has lost the file: {error}") from error


def _visible(head: RunHead) -> StoredFile | None:
    """Return the file of a log; None: it is not complete."""
    if head.open or head.status != _WRITTEN:
        return None
    labels = head.labels
    return StoredFile(
        head.id,
        head.tenant,
        labels["name"],
        head.program,
        int(labels["bytes"]),
        head.created_s,
        float(labels["expires"]),
    )
