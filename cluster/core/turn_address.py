"""The address at which a replica serves turns."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TurnAddress:
    """The address of a replica's turn server."""

    host: str
    """The IP address of its node, at which other nodes reach it."""
    port: int
    token: str = field(repr=False)
    """The bearer token that it accepts. It is valid as long as the replica's process."""
