"""The direct data plane: the router's note to a replica about a turn that HAProxy forwards, in one header.

HAProxy removes what clients send under the prefix of this header's name, and lets the router add headers to the request
that it places. A rejection travels to the client through a replica, too, because HAProxy itself can only answer 503.
"""

import base64
import binascii
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.api.openai import RETRY_AFTER_S
from cluster.core.errors import HttpError, Overloaded

ROUTER_DEPLOYMENT = "DirectRouter"
"""Name of the router's deployment; replicas call it by that."""

NOTE = "x-serve-router-note"
"""The header. Ray's prefix for what its HAProxy trusts is `x-serve-router-`."""


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """An error that the replica answers in the router's place."""

    status: int
    message: str
    code: str
    retry_after_s: float

    @classmethod
    def of(cls, error: Overloaded) -> "RefusalNote":
        """Of the refusal."""
        seconds = error.retry_after_s if error.retry_after_s is not None else RETRY_AFTER_S
        return cls(error.status, error.message, error.code or "overloaded", seconds)

    def as_error(self) -> HttpError:
        """What the client receives."""
        return Overloaded(self.message, status=self.status, code=self.code, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class RouterNote:
    """What the router made of a request."""

    key: str | None = None
    """The program that it placed; None: it saw none."""
    epoch: int | None = None
    """Of the program's home; None: nobody knows it."""
    turn: str | None = None
    """Its name of the turn; it waits to hear of it that it is over."""
    refusal: RefusalNote | None = None

    def encode(self) -> str:
        """As a header's value: letters, digits, `-`, `_` and `=`."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, value: str) -> "RouterNote":
        """The inverse of :meth:`encode`.

        Raises:
            ValueError: ``value`` is not what :meth:`encode` writes.
        """
        try:
            fields: dict[str, Any] = json.loads(base64.urlsafe_b64decode(value.encode()))
            note = cls(**fields)
            return note if note.refusal is None else replace(note, refusal=RefusalNote(**fields["refusal"]))
        except (TypeError, binascii.Error, ValueError) as error:
            raise ValueError(f"not a note of the router: {value[:64]!r}") from error
