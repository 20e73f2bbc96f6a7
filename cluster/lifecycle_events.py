"""What may happen to a program on its replica, and what is to be done then: the words of `cluster.lifecycle`."""

from dataclasses import dataclass

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnArrived:
    """A turn was accepted. ``last``: the client says that no other will follow."""

    at_s: float
    last: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler gave a waiting turn its memory; a hold has been used."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn generated its last token. ``served_tokens``: computed for it; ``tools``: what it asked for."""

    at_s: float
    tools: tuple[str, ...]
    served_tokens: int
    context_tokens: int = 0
    """Of the program after the turn."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """From the turn's arrival to its last token."""
    on_time: bool = True
    """Its first token came within the SLO's bound."""


@dataclass(frozen=True, slots=True)
class TurnAborted:
    """A turn ended without a result that the program can go on from."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """Decided: the blocks stay allocated until ``until_s``."""

    at_s: float
    until_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """Decided: the blocks are given back."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Swapped:
    """Decided: the blocks are given back, the host has a copy. Of a held program: its hold ends so."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """The copy is on the device again and held until ``until_s``."""

    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The copy was not loaded, but it is still there."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class CopyLost:
    """The host has no copy any more."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """A hold ended unused: expired, broken for somebody who needed the memory, or asked for."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """The executor started the tools of the pause."""

    at_s: float
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """The slowest tool of the pause has finished; the next turn is on its way."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The program will not come back: its client said so, or it was idle for too long."""

    at_s: float
    reason: str


Event = (
    TurnArrived
    | Admitted
    | TurnEnded
    | TurnAborted
    | Held
    | Released
    | Swapped
    | Fetched
    | FetchFailed
    | CopyLost
    | HoldEnded
    | ToolStarted
    | ToolFinished
    | Ended
)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decide:
    """Ask the pause policy, and answer with Held, Swapped or Released."""


@dataclass(frozen=True, slots=True)
class Observe:
    """A pause of this length for this tool key was seen."""

    tool: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FreeHold:
    """Give the held blocks back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load the copy, and answer with Fetched, FetchFailed or CopyLost."""


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Nobody waits for the load that is under way: no answer is expected any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """The program is over after so many turns, for which so many tokens were computed."""

    turns: int
    served_tokens: int = 0


Action = Decide | Observe | FreeHold | Fetch | CancelFetch | Conclude
