"""What can be wrong with the disk tier, by name."""

import errno
from enum import StrEnum


class Direction(StrEnum):
    """The direction of a transfer. The values are labels of metrics."""

    READ = "read"
    WRITE = "write"


class Trouble(StrEnum):
    """What is wrong with the volume, or with a chunk. The values are labels of metrics."""

    FULL = "full"
    READ_ONLY = "read_only"
    GONE = "gone"
    STALLED = "stalled"
    """A transfer has made no progress for STALL_S."""
    IO_ERROR = "io_error"
    NO_SLOT = "no_slot"
    """All slots are in use by other replicas. This one only reads."""
    DAMAGED = "damaged"
    """A chunk was wrong or torn. It was deleted, and computed again."""
    MISSING = "missing"
    """A chunk was deleted between its lookup and its load."""
    TOO_LATE = "too_late"
    """A turn has waited longer for a load than computing would have taken, and was computed."""


TROUBLE_OF_ERRNO = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EFBIG: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.READ_ONLY,
    errno.EPERM: Trouble.READ_ONLY,
    errno.ENOENT: Trouble.GONE,
    errno.ENOTDIR: Trouble.GONE,
    errno.ENODEV: Trouble.GONE,
    errno.ENXIO: Trouble.GONE,
    errno.ESTALE: Trouble.GONE,
    errno.ENOTCONN: Trouble.GONE,
}
"""What an operating system's error means. Others are IO_ERROR."""
