"""API keys: the tenant and the roles of a request, from a file that is read again whenever it changes.

A key is 256 random bits, so that one pass of SHA-256 protects it as well as a slow hash would a password. Only digests
are kept in memory and, unless a file has plain keys, on disk. A presented key is looked up by its digest, which shows
a timing attacker nothing of the key, and compared in constant time.
"""

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from cluster.config.sections import Section, TenantName
from cluster.core.clock import MonotonicClock
from cluster.core.errors import ConfigError
from cluster.core.program import DEFAULT_TENANT
from cluster.core.supervision import SupervisedTasks

logger = logging.getLogger("caesura.keys")

KEY_PREFIX = "csk-"
"""Lets scanners for leaked secrets recognise a key of ours."""
KEY_VARIABLE = "CAESURA_API_KEY"
"""The environment variable in which commands look for the key that they send."""
MIN_KEY_LENGTH = 20
"""Characters of a key that a file has in plain text; shorter ones can be guessed."""


class Role(StrEnum):
    """What a key permits."""

    SERVE = "serve"
    """Models, turns, programs and tools."""
    METRICS = "metrics"
    """`/metrics`."""
    ADMIN = "admin"
    """Everything, also the routes under /admin."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key."""

    tenant: str = DEFAULT_TENANT
    roles: frozenset[Role] = frozenset((Role.ADMIN,))
    name: str = ""
    """The key's name, for logs."""

    def may(self, role: Role) -> bool:
        """Whether the key has this role."""
        return role in self.roles or Role.ADMIN in self.roles


ANYBODY = Caller()
"""The caller of every request where no keys are configured."""


_NOBODY: tuple[str, Caller | None, None] = ("", None, None)


class KeyEntry(Section):
    """A key in a file: its digest, or the key itself."""

    tenant: TenantName
    """The owner. Programs, responses and prefix-cache entries of different tenants are isolated."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The key's SHA-256, in hexadecimal; `caesura keys new` prints it."""
    key: str | None = Field(None, min_length=MIN_KEY_LENGTH, max_length=512, pattern=r"^[!-~]+$")
    """The key itself, for files that are secrets anyway."""
    roles: frozenset[Role] = Field(frozenset((Role.SERVE,)), min_length=1)
    """What the key permits."""
    name: str = Field("", max_length=128)
    """For people; it appears in logs, where the key never does."""
    expires: AwareDatetime | None = None
    """From then on the key is invalid. The time needs a time zone."""

    @model_validator(mode="after")
    def _one_secret(self) -> "KeyEntry":
        if (self.sha256 is None) == (self.key is None):
            raise ValueError("give `sha256` or `key`, and not both")
        return self


class KeyFileContent(Section):
    """A file of keys."""

    keys: tuple[KeyEntry, ...] = Field(min_length=1)


class KeyRing:
    """All keys. Immutable.

    Args:
        entries: raises ValueError if two are the same key.
    """

    def __init__(self, entries: tuple[KeyEntry, ...]) -> None:
        self._entries: dict[str, tuple[str, Caller, datetime | None]] = {}
        for entry in entries:
            digest = entry.sha256 if entry.key is None else digest_of(entry.key)
            assert digest is not None
            if digest in self._entries:
                raise ValueError(f"the key {entry.name!r} of {entry.tenant!r} is there twice")
            self._entries[digest] = (digest, Caller(entry.tenant, entry.roles, entry.name), entry.expires)

    def __len__(self) -> int:
        return len(self._entries)

    def callers(self) -> list[Caller]:
        """The caller of every key."""
        return [caller for _, caller, _ in self._entries.values()]

    def find(self, key: str, now: datetime) -> Caller | None:
        """The caller of this key; None: it is unknown or has expired."""
        presented = digest_of(key)
        kept, caller, expires = self._entries.get(presented, _NOBODY)
        if not hmac.compare_digest(presented, kept) or (expires is not None and now >= expires):
            return None
        return caller


def digest_of(key: str) -> str:
    """SHA-256 in hexadecimal."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def read_keys(path: Path) -> KeyRing:
    """The keys of a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, or holds what is no key; the message names the file and the entry, never a key.
    """
    try:
        content: Any = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {type(error).__name__}") from None  # its text quotes the file
    return keys_of(content, str(path))


def keys_of(content: Any, where: str) -> KeyRing:
    """The keys of a parsed file.

    Raises:
        ConfigError: as :func:`read_keys`; ``where`` is what the message calls the file.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: must be a mapping with `keys`")
    try:
        return KeyRing(KeyFileContent.model_validate(content).keys)
    except ValidationError as error:
        # Without the input: it may be a key.
        lines = (
            f"{where}: {'.'.join(map(str, detail['loc'])) or 'keys'}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_input=False, include_context=False)
        )
        raise ConfigError("\n".join(lines)) from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def client_headers() -> dict[str, str]:
    """Headers with the key of the environment variable CAESURA_API_KEY; none without it."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def utc_now() -> datetime:
    """The current time, by which keys expire."""
    return datetime.now(UTC)


Stamp = tuple[int, int, int] | None
"""Changes when the content of a file changes."""


class KeyFile:
    """The callers of a key file that may change. There are none until it is opened.

    A change that cannot be read is logged, and the keys read last stay valid: an empty secret in the middle of an
    update must neither admit nor lock out everybody.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp = None
        self._ring = KeyRing(())
        self.failures = 0
        """Changes that could not be read."""
        self._tasks = SupervisedTasks("keys", MonotonicClock())

    def open(self) -> None:
        """Read it for the first time.

        Raises:
            ConfigError: it cannot be used.
        """
        self._stamp = _stamp(self._path)
        self._ring = read_keys(self._path)

    def find(self, key: str) -> Caller | None:
        """The caller of this key; None: it is unknown or has expired."""
        return self._ring.find(key, utc_now())

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether it was read."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self._ring = read_keys(self._path)
        except ConfigError as error:
            self.failures += 1
            logger.error("the keys read before stay valid: %s", error)
            return False
        logger.info("%s: %d keys", self._path, len(self._ring))
        return True

    def watch(self, period_s: float) -> None:
        """Check for changes from now on; needs a running event loop."""
        self._tasks.start("read changed keys", lambda: self._watch(period_s))

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._tasks.failed

    async def aclose(self) -> None:
        """Stop checking."""
        await self._tasks.aclose()

    async def _watch(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await asyncio.to_thread(self.refresh)


@cache
def key_file(path: Path) -> KeyFile:
    """The one of this process: the middleware and the ingress, which opens and watches it, must share it."""
    return KeyFile(path)


def _stamp(path: Path) -> Stamp:
    """Through links: Kubernetes changes a secret by pointing a link elsewhere."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
