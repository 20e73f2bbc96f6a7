"""The address at which a replica serves turns."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TurnAddress:
    """The address of a replica's turn server."""

    host: str
    """Its address in the network."""
    port: int
    token: str = field(repr=False)
    """The bearer token that it accepts."""
