"""The events that may happen to a program on its replica, and the actions that `lifecycle.machine` answers with."""

from dataclasses import dataclass
from enum import StrEnum


class PauseReason(StrEnum):
    """Why a policy decides as it does about a paused program's KV. A label of metrics, so there are few."""

    POLICY = "policy"
    """The policy always decides so."""
    RETENTION = "retention"
    """The client asked for it."""
    TTL = "ttl"
    DEFAULT_TTL = "default ttl"
    LONG_PAUSE = "long pause"
    SHORT_TOOL = "short tool"
    LONG_TOOL = "long tool"
    NO_PIN_PAYS = "no pin pays"
    BACK = "back"
    """The program's next turn waits."""
    FREE = "free"
    """Nobody else wants the memory."""
    PAYS = "pays"
    DOES_NOT_PAY = "does not pay"
    LEAST_WASTE = "least waste"
    OTHER = "other"
    """The reason of a policy that is not ours."""


class ReleaseReason(StrEnum):
    """Why a hold ended. The value is shown to people; metrics carry the ``label``, which several reasons may share."""

    label: str

    def __new__(cls, text: str, label: str = "") -> "ReleaseReason":
        """A member that is equal to its text."""
        member = str.__new__(cls, text)
        member._value_ = text
        member.label = label or text
        return member

    USED = "used"
    """The program's next turn took the blocks over."""
    EXPIRED = "expired"
    IDLE = "idle", "expired"
    """The program was idle for too long."""
    TABLE_FULL = "table full", "expired"
    """The replica knows too many programs; this one was used least recently."""
    BROKEN_RUNNING = "broken for a running turn", "broken_running"
    BROKEN_WAITING = "broken for a waiting turn", "broken_waiting"
    BROKEN_STARVED = "broken for a starved turn", "broken_starved"
    """A turn waited while nothing ran."""
    SWAPPED = "swapped"
    """At a review: the host has a copy."""
    REVIEWED = "reviewed"
    """At a review: the policy released it."""
    ASKED = "asked"
    """The client or the cluster asked for it, or the program ended."""
    MOVED = "moved"
    """The program is placed on another replica now."""
    ABORTED = "aborted"
    """The program's turn was aborted."""
    POLICY_SWITCH = "policy switch", "reset"
    CACHE_RESET = "cache reset", "reset"


class LoadFailure(StrEnum):
    """Why a copy on the host was not loaded."""

    NO_CONTEXT = "nothing to fetch"
    GONE = "not on the host any more"
    NO_MEMORY = "no room"
    ABORTED = "aborted"
    CACHE_RESET = "cache reset"


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
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Released:
    """Decided: the blocks are given back."""

    at_s: float
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Swapped:
    """Decided: the blocks are given back, the host has a copy. Of a held program: its hold ends so."""

    at_s: float
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Fetched:
    """The copy is on the device again and held until ``until_s``."""

    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The copy was not loaded, but it is still there."""

    at_s: float
    reason: LoadFailure


@dataclass(frozen=True, slots=True)
class CopyLost:
    """The host has no copy any more."""

    at_s: float
    reason: LoadFailure


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """A hold ended unused: expired, broken for somebody who needed the memory, or asked for."""

    at_s: float
    reason: ReleaseReason
    policy_reason: PauseReason | None = None
    """Of a hold that the policy ended at a review."""


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
    reason: ReleaseReason


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

    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load the copy, and answer with Fetched, FetchFailed or CopyLost."""


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Nobody waits for the load that is under way: no answer is expected any more."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """The program is over after so many turns, for which so many tokens were computed."""

    turns: int
    served_tokens: int = 0


Action = Decide | Observe | FreeHold | Fetch | CancelFetch | Conclude
