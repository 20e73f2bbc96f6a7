"""Folders of the disk tier: which files a replica may write, and which it may read.

    <path>/<identity>/slot-<n>/<hh>/<key>.kv

``identity`` stands for all that the bytes of a chunk depend on beside its key: the model's weights, the KV cache's type
and layout, the versions. A replica writes into one slot, which it has locked, and reads from all slots of its identity.
So a program whose replica was killed finds its KV from any other replica on the volume. The kernel releases the lock of
a process that ends, however it ends, and the next replica that starts takes the slot with its files over. Since each
slot is bounded, so is the whole folder. A slot has all chunks of its programs: a chunk that another slot has already
gets a second name (a hard link), so that it stays when the other slot deletes its own.

Locks are `flock`: they hold on one machine for all containers, and on NFS 4.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path

from replicas.disk_tier.chunk_file import TEMPORARY

SUFFIX = ".kv"
STALE_S = 24 * 3600.0
"""Seconds after which files that nobody has used are deleted: those of another identity, and those that a replica finds
in its slot when it starts."""

VOLUME_FILE = "volume"
"""File with the random name of the folder, by which replicas know that they see the same one."""

ATTEMPTS = 5
"""Number of attempts to read this name, or to write one. Another replica may replace it meanwhile."""

_NAME = re.compile(r"[0-9a-f]{2,128}")
_VOLUME = re.compile(rb"[0-9a-f]{16}")
"""What the file with the folder's name contains."""


class Slots:
    """The slots of one identity. Methods raise OSError if the volume fails.

    Args:
        path: the configured folder.
        identity: name of the identity's folder.
        count: number of slots.
    """

    def __init__(self, path: Path, identity: str, count: int) -> None:
        self.path = path
        self.identity = identity
        self.count = count
        self.volume = ""
        """The name of the folder that all replicas have that see it. It is empty until a slot was taken."""
        self.own: int | None = None
        """The slot that this process has locked; None: it has none, and only reads."""
        self.generation = ""
        """What the names of files have beside the key since the weights were replaced. Such files are for this process
        only, and are deleted by the next one."""
        self._lock: int | None = None

    @property
    def folder(self) -> Path:
        """The identity's folder."""
        return self.path / self.identity

    def take(self, create: bool) -> bool:
        """Lock a slot that no living process has. Return False if there is none.

        Args:
            create: whether the configured folder is made if there is none. If a volume has gone, it must not be: what
                is under its mount point is another file system.
        """
        if self.own is not None:
            return True
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True, mode=0o700)
        self.volume = self._volume()
        for number in range(self.count):
            folder = self._slot(number)
            folder.mkdir(exist_ok=True, mode=0o700)
            descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                if not _locks(descriptor):
                    os.close(descriptor)
                    continue
                if not os.path.samestat(os.fstat(descriptor), (folder / "lock").stat()):
                    raise FileNotFoundError(errno.ENOENT, "it was deleted while it was locked", str(folder))
                os.utime(folder / "lock")  # the slot is in use, whatever its files' ages
            except OSError:
                os.close(descriptor)
                raise
            self.own, self._lock = number, descriptor
            return True
        return False

    def _volume(self) -> str:
        """Return the name of the folder. The first replica chooses it, also where the file is damaged."""
        path = self.folder / VOLUME_FILE
        for _ in range(ATTEMPTS):
            if (name := _name_in(path)) is not None:
                return name
            _remove_damaged(path)
            own = path.with_name(f"{VOLUME_FILE}.{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}")
            own.write_text(os.urandom(8).hex())
            try:
                path.hardlink_to(own)
            except FileExistsError:
                pass  # another replica was faster
            except OSError:  # there are no hard links on this volume
                own.replace(path)
            own.unlink(missing_ok=True)
        raise OSError(errno.EIO, "the name that was written cannot be read", str(path))

    def release(self) -> None:
        """Unlock the slot. Its files stay for the next replica."""
        lock = self._lock
        self.own = self._lock = None  # also where the volume is gone, and the file cannot be closed
        if lock is not None:
            os.close(lock)

    def own_file(self, key: bytes) -> Path:
        """Return the file of a chunk in the own slot."""
        assert self.own is not None, "this process has no slot"
        return self._file(self.own, key)

    def find(self, key: bytes) -> Path | None:
        """Return a chunk's file, in whichever slot it is."""
        own_first = sorted(range(self.count), key=lambda number: number != self.own)
        return next((path for number in own_first if (path := self._file(number, key)).exists()), None)

    def scan(self, wanted_bytes: int) -> list[bytes]:
        """Return the keys of the own slot's chunks, the one used longest ago first. Delete all other files there.

        Args:
            wanted_bytes: size of a chunk's file. Files of other sizes are torn.
        """
        assert self.own is not None, "this process has no slot"
        found, now_s = [], self._now_s()
        for folder in self._slot(self.own).iterdir():
            for file in folder.iterdir() if folder.is_dir() else ():
                with suppress(FileNotFoundError):
                    status, key = file.stat(), key_of(file)
                    if key is None or status.st_size != wanted_bytes or now_s - status.st_mtime > STALE_S:
                        file.unlink()
                    else:
                        found.append((status.st_mtime, key))
        return [key for _, key in sorted(found)]

    def remove_stale(self) -> list[str]:
        """Delete the folders of identities, and slots, that no process uses any more. Return their names."""
        removed, now_s = [], self._now_s()
        others = [folder for folder in self.path.iterdir() if folder.name != self.identity]
        for folder in [*others, *self._surplus()]:
            with suppress(OSError):  # another replica deletes it just now, or it is not ours, as `lost+found`
                if now_s - _last_use_s(folder) > STALE_S and _removed(folder):
                    removed.append(folder.name)
        return removed

    def _surplus(self) -> Iterator[Path]:
        for slot in _slots_in(self.folder):
            if int(slot.name.removeprefix("slot-")) >= self.count:
                yield slot

    def _now_s(self) -> float:
        """Return the volume's time, with which the times of its files are compared."""
        os.utime(self.folder)
        return self.folder.stat().st_mtime

    def _slot(self, number: int) -> Path:
        return self.folder / f"slot-{number}"

    def _file(self, number: int, key: bytes) -> Path:
        name = key.hex()
        return self._slot(number) / name[:2] / f"{name}{self.generation}{SUFFIX}"


def _name_in(path: Path) -> str | None:
    """Return the name of a folder, which its file has; None: there is no file, or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return content.decode() if _VOLUME.fullmatch(content) else None


def _remove_damaged(path: Path) -> None:
    """Delete the file with the name of a folder, if it is damaged. Of several replicas that do it, one does."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        is_this = os.path.samestat(os.fstat(file.fileno()), path.stat())  # and not one that has replaced it
        if is_this and not _VOLUME.fullmatch(file.read()):
            path.unlink()


def key_of(file: Path) -> bytes | None:
    """Return the key of a chunk's file; None: it is no such file, or one that was being written."""
    name = file.name.removesuffix(SUFFIX)
    is_chunk = file.suffix == SUFFIX and TEMPORARY not in file.name and _NAME.fullmatch(name)
    return bytes.fromhex(name) if is_chunk and len(name) % 2 == 0 else None


def _slots_in(folder: Path) -> Iterator[Path]:
    """Yield the slots in a folder, or the folder itself if it is one. Other folders have none, and are left alone."""
    if folder.is_dir():
        candidates = [folder] if _is_slot(folder) else folder.iterdir()
        yield from (slot for slot in candidates if _is_slot(slot))


def _is_slot(folder: Path) -> bool:
    return re.fullmatch(r"slot-\d+", folder.name) is not None and (folder / "lock").is_file()


def _last_use_s(folder: Path) -> float:
    """Return when a file below a folder was written or deleted last, or a slot was taken, by the times of its folders.

    Reads are not seen. A folder without slots counts as in use.
    """
    times = (path.stat().st_mtime for slot in _slots_in(folder) for path in (slot, *slot.iterdir()))
    return max(times, default=inf)


def _removed(folder: Path) -> bool:
    """Delete a folder, unless a process has one of its slots. Nobody takes one meanwhile. Return if it is gone."""
    with ExitStack() as locks:
        for slot in _slots_in(folder):
            descriptor = os.open(slot / "lock", os.O_RDWR | os.O_CLOEXEC)
            locks.callback(os.close, descriptor)
            if not _locks(descriptor):
                return False
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _locks(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed. Return False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
