"""One KV chunk in one file: the bytes, then a page with what is needed to recognise a wrong or torn chunk.

The page has a magic number, a CRC-32 of the bytes and of the key, the number of bytes and the key. A chunk is therefore
recognised as damaged if bits were flipped, if the file was cut or never reached the disk (a file is renamed to its name
when it was written, but it is not synced), and if it has the name of another chunk.
"""

import errno
import mmap
import os
import struct
import threading
import zlib
from contextlib import suppress
from pathlib import Path

PAGE = mmap.PAGESIZE
"""Bytes of the last page. Files are a multiple of it, as direct I/O requires."""

MAGIC = b"caesura1"
_HEAD = struct.Struct("<8sIQH")
_local = threading.local()

TEMPORARY = ".tmp"
"""End of the name of a file that is being written."""


class DamagedChunkError(Exception):
    """A file does not have the chunk that its name promises."""


def file_bytes(chunk_bytes: int) -> int:
    """Return the size of the file of a chunk."""
    return chunk_bytes + PAGE


class ChunkFiles:
    """Writes and reads files of chunks.

    Args:
        direct: whether the operating system's cache is bypassed (``O_DIRECT``).
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct

    def write(self, path: Path, key: bytes, chunk: memoryview) -> None:
        """Write a chunk. A file of this name is replaced, and never seen half written.

        Args:
            path: the file's name. Its folder is created, but no folder above.
            key: the chunk's key, at most 128 bytes.
            chunk: the chunk's bytes, contiguous. For direct I/O they begin and end at pages.

        Raises:
            OSError: the file cannot be written.
        """
        page = _page()
        head = _HEAD.pack(MAGIC, _checksum(chunk, key), len(chunk), len(key)) + key
        page[: len(head)] = head
        page[len(head) :] = bytes(PAGE - len(head))
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY}")
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | (os.O_DIRECT if self.direct else 0)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(temporary, flags, 0o600)
            try:
                if os.writev(descriptor, [chunk, page]) < file_bytes(len(chunk)):
                    raise OSError(errno.ENOSPC, "only a part was written", str(path))
            finally:
                os.close(descriptor)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def link(self, found: Path, path: Path) -> bool:
        """Give a file a second name, which needs no copy. Return False where the volume cannot.

        Args:
            found: the file.
            path: the other name. Its folder is created, but no folder above.
        """
        path.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            path.hardlink_to(found)
        except OSError:
            return False
        os.utime(path)
        return True

    def read(self, path: Path, key: bytes, into: memoryview) -> None:
        """Read a chunk into memory. If it is damaged, ``into`` has invalid bytes afterwards.

        Args:
            path: the file's name.
            key: the chunk's key.
            into: where its bytes go; their number is the chunk's size.

        Raises:
            DamagedChunkError: the file is not that of this chunk, or not as it was written.
            OSError: the file cannot be read.
        """
        page = _page()
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        try:
            read = os.readv(descriptor, [into, page])
        finally:
            os.close(descriptor)
        if read < file_bytes(len(into)):
            raise DamagedChunkError(f"{path}: {read} bytes instead of {file_bytes(len(into))}")
        magic, checksum, size, key_size = _HEAD.unpack_from(page)
        found = page[_HEAD.size : _HEAD.size + key_size]
        if (magic, size, found) != (MAGIC, len(into), key):
            raise DamagedChunkError(f"{path}: it is not the file of this chunk")
        if checksum != _checksum(into, key):
            raise DamagedChunkError(f"{path}: the checksum differs")


def _checksum(chunk: memoryview, key: bytes) -> int:
    return zlib.crc32(key, zlib.crc32(chunk))


def _page() -> mmap.mmap:
    """Return this thread's page of memory, which is aligned as direct I/O requires."""
    if not hasattr(_local, "page"):
        _local.page = mmap.mmap(-1, PAGE)
    page: mmap.mmap = _local.page
    return page
