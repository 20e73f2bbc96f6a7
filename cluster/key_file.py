"""The file of keys, read again whenever it changes: keys come and go without a restart."""

import asyncio
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

from cluster.errors import ConfigError
from cluster.keys import Caller, KeyRing, read_keys, utc_now

logger = logging.getLogger("caesura.keys")

Stamp = tuple[int, int, int] | None
"""Of a file: another one when its content is."""


class KeyFile:
    """Who may come in, by a file that may change. Nobody until it is opened.

    A change that cannot be read is logged, and what was read last stays in force: an empty secret in the middle of an
    update must neither open the door nor lock everybody out.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp = None
        self._ring = KeyRing(())
        self.failures = 0
        """Changes that could not be read."""
        self._watcher: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Read it for the first time.

        Raises:
            ConfigError: it cannot be used.
        """
        self._stamp = _stamp(self._path)
        self._ring = read_keys(self._path)

    def find(self, key: str) -> Caller | None:
        """Whose key this is; None: nobody's, or nobody's any more."""
        return self._ring.find(key, utc_now())

    def refresh(self) -> bool:
        """Read the file if it has changed since; has it been read?"""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._ring = read_keys(self._path)
        except ConfigError as error:
            self.failures += 1
            logger.error("the keys of before stay in force: %s", error)
            return False
        logger.info("%s: %d keys", self._path, len(self._ring))
        return True

    def watch(self, period_s: float) -> None:
        """Look for changes from now on; needs a running event loop."""
        self._watcher = asyncio.create_task(self._watch(period_s))

    async def aclose(self) -> None:
        """Stop looking."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher

    async def _watch(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await asyncio.to_thread(self.refresh)


@cache
def key_file(path: Path) -> KeyFile:
    """The one of this process: its door and whoever opens and watches the file must have the same."""
    return KeyFile(path)


def _stamp(path: Path) -> Stamp:
    """Through links: Kubernetes changes a secret by pointing a link elsewhere."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
