"""API keys: who may come in, as whom, and for what.

A key is 256 random bits, so that one pass of SHA-256 protects it as well as a slow hash would a password. Only digests
are kept in memory and, unless a file has plain keys, on disk. A presented key is looked up by its digest, which tells
a timing attacker nothing of the key, and compared in constant time.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from cluster.config_section import Section
from cluster.errors import ConfigError
from cluster.program import DEFAULT_TENANT, MAX_ID_LENGTH

KEY_PREFIX = "csk-"
"""Lets scanners for leaked secrets recognise a key of ours."""
KEY_VARIABLE = "CAESURA_API_KEY"
"""The environment variable in which commands look for the key that they send."""
MIN_KEY_LENGTH = 20
"""Characters of a key that a file has in plain text; shorter ones can be guessed."""

TenantName = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""No slash, which ends a tenant in a program's key, and nothing that a label or a path must quote."""


class Role(StrEnum):
    """What a key opens."""

    SERVE = "serve"
    """Models, turns, programs and tools."""
    METRICS = "metrics"
    """`/metrics`."""
    ADMIN = "admin"
    """Everything: the routes under /admin, too."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key it was."""

    tenant: str = DEFAULT_TENANT
    roles: frozenset[Role] = frozenset((Role.ADMIN,))
    name: str = ""
    """Of the key, for people."""

    def may(self, role: Role) -> bool:
        """Does the key open this?"""
        return role in self.roles or Role.ADMIN in self.roles


ANYBODY = Caller()
"""Where no keys are configured."""


_NOBODY: tuple[str, Caller | None, None] = ("", None, None)


class KeyEntry(Section):
    """A key in a file: its digest, or the key itself."""

    tenant: TenantName
    """Whose it is. Programs, responses and the prefix cache of different tenants never meet."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The key's SHA-256, in hexadecimal; `caesura keys new` prints it."""
    key: str | None = Field(None, min_length=MIN_KEY_LENGTH, max_length=512, pattern=r"^[!-~]+$")
    """The key itself, for files that are secrets anyway."""
    roles: frozenset[Role] = Field(frozenset((Role.SERVE,)), min_length=1)
    """What it opens."""
    name: str = Field("", max_length=128)
    """For people; told in logs, where the key never is."""
    expires: AwareDatetime | None = None
    """From then on it opens nothing; with its time zone."""

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
        """Of every key."""
        return [caller for _, caller, _ in self._entries.values()]

    def find(self, key: str, now: datetime) -> Caller | None:
        """Whose key this is; None: nobody's, or nobody's any more."""
        presented = digest_of(key)
        kept, caller, expires = self._entries.get(presented, _NOBODY)
        if not hmac.compare_digest(presented, kept) or (expires is not None and now >= expires):
            return None
        return caller


def digest_of(key: str) -> str:
    """SHA-256 in hexadecimal."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A key that nobody has."""
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
    """What a client of ours sends: the key of the environment variable CAESURA_API_KEY, if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def utc_now() -> datetime:
    """The time of day: what keys expire by."""
    return datetime.now(UTC)
