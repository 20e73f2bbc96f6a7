"""The thread that opens the disk tier's volume, takes a slot, and deletes files. It may hang in the volume."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vllm.v1.kv_offload.tiering.fs.io import probe_o_direct

from cluster.core.clock import Clock
from replicas.disk_tier.slots import Slots
from replicas.disk_tier.trouble import Direction

logger = logging.getLogger("vllm.caesura.disk_tier")

RETRY_S = 10.0
"""Seconds after which what has failed is tried again."""
CLEAN_S = 3600.0
"""Seconds between two searches for folders that nobody uses any more."""
END_S = 2.0
"""Seconds for which the end of the process waits for each thread, which may hang in the volume."""


class Janitor:
    """Opens the volume, takes a slot, and deletes files, in a thread.

    Args:
        slots: the folders.
        clock: a monotonic clock.
        wanted_bytes: size of a chunk's file.
        opened: called with whether direct I/O works, and with the keys of the slot's chunks, once a slot is locked.
        failed: called with what has failed; None: all slots are in use.
    """

    def __init__(
        self,
        slots: Slots,
        clock: Clock,
        wanted_bytes: int,
        opened: Callable[[bool, Sequence[bytes] | None], None],
        failed: Callable[[Direction, Exception | None], None],
    ) -> None:
        self._slots = slots
        self._clock = clock
        self._wanted_bytes = wanted_bytes
        self._opened = opened
        self._failed = failed
        self._doomed: set[Path] = set()
        self._undeleted: set[Path] = set()
        """Doomed files whose deletion has failed."""
        self._logged = 0
        """Number of these files in the last line of the log."""
        self._unlinking = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._was_open = False
        self._clean_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="caesura_disk_janitor", daemon=True)
        self._thread.start()

    def delete(self, path: Path) -> None:
        """Delete a file soon, unless it is kept before."""
        self.doom((path,))
        self._tasks.put(lambda: self.unlink(path))

    def doom(self, paths: Iterable[Path]) -> None:
        """Note files that are about to be deleted. It does no I/O and does not wait."""
        self._doomed.update(paths)

    def unlink(self, path: Path) -> OSError | None:
        """Delete a file that was doomed and was not kept since. It is for threads, as it asks the volume.

        If that fails, return why. It is tried again later.
        """
        with self._unlinking:
            self._undeleted.discard(path)
            if path in self._doomed:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    self._undeleted.add(path)
                    return error
                self._doomed.discard(path)
        return None

    def keep(self, path: Path) -> None:
        """Delete a file now or not at all, because it is about to be written. It is for threads, as it may wait."""
        with self._unlinking:
            self._doomed.discard(path)

    def reopen(self) -> None:
        """Give the slot up and take one again, because the volume was gone."""
        self._tasks.put(self._release)

    def wake(self) -> None:
        """Try at once what would be tried in a while."""
        self._tasks.put(self._maintain)

    def wait(self) -> None:
        """Wait until all files are deleted that were to be."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait(END_S)

    def shutdown(self) -> None:
        """End the thread, if it does not hang."""
        self._tasks.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            self._do(self._maintain)
            deadline_s = self._clock.now_s() + RETRY_S
            while (left_s := deadline_s - self._clock.now_s()) > 0:
                try:
                    task = self._tasks.get(timeout=left_s)
                except queue.Empty:
                    break
                if task is None:
                    return
                self._do(task)

    def _do(self, task: Callable[[], object]) -> None:
        """Run a task. Its failure is reported and does not end the thread, which is the only one that tries again."""
        try:
            task()
        except OSError as error:
            self._failed(Direction.WRITE, error)
        except Exception as error:
            logger.exception("Disk tier: an unexpected failure")
            self._failed(Direction.WRITE, error)

    def _maintain(self) -> None:
        self._open()
        self._delete_again()
        self._clean()

    def _open(self) -> None:
        """Take a slot, if there is none."""
        if self._slots.own is not None:
            return
        try:
            taken = self._slots.take(create=not self._was_open)
            direct, self._was_open = probe_o_direct(str(self._slots.folder)), True
            self._opened(direct, None)
            if taken:
                self._opened(direct, self._slots.scan(self._wanted_bytes))
            else:
                self._failed(Direction.WRITE, None)
        except Exception:
            self._release()  # otherwise a slot that was not scanned would never be used
            if self._slots.folder.is_dir():  # a volume that cannot be written may be read
                self._opened(False, None)
            raise

    def _release(self) -> None:
        """Unlock the slot. Another replica may take it, so that no file of it is deleted any more."""
        with self._unlinking:
            self._doomed.clear()
            self._undeleted.clear()
        self._slots.release()

    def _delete_again(self) -> None:
        """Delete the files whose deletion has failed."""
        errors = [error for path in list(self._undeleted) if (error := self.unlink(path)) is not None]
        if errors and len(errors) != self._logged:
            logger.warning("Disk tier: %d files cannot be deleted, such as %s", len(errors), errors[0])
        self._logged = len(errors)

    def _clean(self) -> None:
        """Delete folders that nobody uses."""
        if self._clock.now_s() >= self._clean_at_s:
            self._clean_at_s = self._clock.now_s() + CLEAN_S
            for name in self._slots.remove_stale():
                logger.info("Disk tier: %s was deleted, which no replica has used for a day", name)
