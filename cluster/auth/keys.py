"""API keys, which determine the tenant and the roles of a request. Their file is read again whenever it changes.

A key has 256 random bits, so that one pass of SHA-256 protects it as well as a slow hash protects a password. Only
digests are kept in memory, and on disk too unless a file has plain keys. A key is looked up by its digest, so that
timing reveals nothing about the key, and compared in constant time.
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
"""Prefix of keys, by which scanners for leaked secrets can recognise them."""
KEY_VARIABLE = "CAESURA_API_KEY"
"""The environment variable with the key that commands send."""
MIN_KEY_LENGTH = 20
"""Minimum length of a key in plain text (characters). Shorter keys could be guessed."""


class Role(StrEnum):
    """A role of a key: the routes that it permits."""

    SERVE = "serve"
    """It permits the routes of models, turns, programs and tools."""
    METRICS = "metrics"
    """It permits `/metrics`."""
    ADMIN = "admin"
    """It permits all routes, including those under /admin."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a key."""

    tenant: str = DEFAULT_TENANT
    roles: frozenset[Role] = frozenset((Role.ADMIN,))
    name: str = ""
    """The key's name, for logs."""

    def may(self, role: Role) -> bool:
        """Return whether the key has this role, or the role `admin`."""
        return role in self.roles or Role.ADMIN in self.roles


ANYBODY = Caller()
"""The caller of every request if no keys are configured."""


_NOBODY: tuple[str, Caller | None, None] = ("", None, None)


class KeyEntry(Section):
    """A key in a file: its digest, or the key itself."""

    tenant: TenantName
    """The key's tenant. Programs, responses and prefix-cache entries of different tenants are isolated."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The key's SHA-256 in hexadecimal, which `caesura keys new` prints. Set this or `key`."""
    key: str | None = Field(None, min_length=MIN_KEY_LENGTH, max_length=512, pattern=r"^[!-~]+$")
    """The key in plain text, for files that are kept secret. Set this or `sha256`."""
    roles: frozenset[Role] = Field(frozenset((Role.SERVE,)), min_length=1)
    """The key's roles."""
    name: str = Field("", max_length=128)
    """A name for people. It appears in logs. The key never does."""
    expires: AwareDatetime | None = None
    """The time from which the key is invalid, with a time zone. null: it never expires."""

    @model_validator(mode="after")
    def _one_secret(self) -> "KeyEntry":
        if (self.sha256 is None) == (self.key is None):
            raise ValueError("give `sha256` or `key`, and not both")
        return self


class KeyFileContent(Section):
    """The content of a file of keys."""

    keys: tuple[KeyEntry, ...] = Field(min_length=1)


class KeyRing:
    """All keys of a file. It is immutable.

    Args:
        entries: the keys.

    Raises:
        ValueError: two entries have the same key.
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
        """Return the caller of every key."""
        return [caller for _, caller, _ in self._entries.values()]

    def find(self, key: str, now: datetime) -> Caller | None:
        """Return the caller of this key; None: the key is unknown or has expired."""
        presented = digest_of(key)
        kept, caller, expires = self._entries.get(presented, _NOBODY)
        if not hmac.compare_digest(presented, kept) or (expires is not None and now >= expires):
            return None
        return caller


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """Make a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def read_keys(path: Path) -> KeyRing:
    """Read the keys of a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, or an entry is invalid. The message names the file and the entry, never a
            key.
    """
    try:
        content: Any = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {type(error).__name__}") from None  # its text quotes the file
    return keys_of(content, str(path))


def keys_of(content: Any, where: str) -> KeyRing:
    """Read the keys of a parsed file.

    Args:
        content: the parsed content.
        where: the name of the file in error messages.

    Raises:
        ConfigError: an entry is invalid, see :func:`read_keys`.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: must be a mapping with `keys`")
    try:
        return KeyRing(KeyFileContent.model_validate(content).keys)
    except ValidationError as error:
        # The input is left out of the message, since it may be a key.
        lines = (
            f"{where}: {'.'.join(map(str, detail['loc'])) or 'keys'}: {detail['msg']}"
            for detail in error.errors(include_url=False, include_input=False, include_context=False)
        )
        raise ConfigError("\n".join(lines)) from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def client_headers() -> dict[str, str]:
    """Return headers with the key in the environment variable CAESURA_API_KEY, or no headers without it."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def utc_now() -> datetime:
    """Return the current time, by which keys expire."""
    return datetime.now(UTC)


Stamp = tuple[int, int, int] | None
"""Modification time, inode and size of a file, which change when its content changes; None: there is no file."""


class KeyFile:
    """The callers of a key file that may change. Before `open` there are none.

    If a changed file cannot be read, the error is logged and the keys that were read last stay valid. A secret that is
    empty during an update must neither admit nor lock out all clients.

    Args:
        path: the file's path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp = None
        self._ring = KeyRing(())
        self.failures = 0
        """Number of changes of the file that could not be read."""
        self._tasks = SupervisedTasks("keys", MonotonicClock())

    def open(self) -> None:
        """Read the file for the first time.

        Raises:
            ConfigError: the file is invalid, see `read_keys`.
        """
        self._stamp = _stamp(self._path)
        self._ring = read_keys(self._path)

    def find(self, key: str) -> Caller | None:
        """Return the caller of this key; None: the key is unknown or has expired."""
        return self._ring.find(key, utc_now())

    def refresh(self) -> bool:
        """Read the file if it has changed. Return whether new keys were read."""
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
        """Check for changes every ``period_s`` seconds until `aclose`. It needs a running event loop."""
        self._tasks.start("read changed keys", lambda: self._watch(period_s))

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._tasks.failed

    async def aclose(self) -> None:
        """Stop checking for changes."""
        await self._tasks.aclose()

    async def _watch(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await asyncio.to_thread(self.refresh)


@cache
def key_file(path: Path) -> KeyFile:
    """Return the process's only `KeyFile` of this path, which the middleware and the ingress must share.

    The ingress opens and watches it.
    """
    return KeyFile(path)


def _stamp(path: Path) -> Stamp:
    """Return the stamp of the file behind symbolic links, since Kubernetes updates a secret by changing a link."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
