"""The events of a program on its replica, and the actions that `lifecycle.machine` returns for them.

Times are seconds on the replica's clock.
"""

from dataclasses import dataclass
from enum import StrEnum


class PauseReason(StrEnum):
    """The reason of a policy's decision about a paused program's KV. It is a label of metrics, so that there are
    few.
    """

    POLICY = "policy"
    """The policy makes the same decision for every pause."""
    RETENTION = "retention"
    """The client asked for it."""
    TTL = "ttl"
    DEFAULT_TTL = "default ttl"
    LONG_PAUSE = "long pause"
    SHORT_TOOL = "short tool"
    LONG_TOOL = "long tool"
    NO_PIN_PAYS = "no pin pays"
    BACK = "back"
    """The program's next turn is waiting."""
    FREE = "free"
    """No other program needs the memory."""
    PAYS = "pays"
    DOES_NOT_PAY = "does not pay"
    LEAST_WASTE = "least waste"
    NO_PREFIX_CACHE = "no prefix cache"
    """The model's engine cannot reuse KV, so that nothing is kept. No policy decides this."""
    OTHER = "other"
    """The policy is not part of Caesura and gave a reason of its own."""


class ReleaseReason(StrEnum):
    """The reason why a hold ended. The value is the readable text. Metrics use ``label``, which reasons may share."""

    label: str

    def __new__(cls, text: str, label: str = "") -> "ReleaseReason":
        """Make a member that is equal to its text."""
        member = str.__new__(cls, text)
        member._value_ = text
        member.label = label or text
        return member

    USED = "used"
    """The program's next turn reused the blocks."""
    EXPIRED = "expired"
    IDLE = "idle", "expired"
    """The program was idle for too long."""
    TABLE_FULL = "table full", "expired"
    """The replica has too many programs, and this one was used least recently."""
    BROKEN_RUNNING = "broken for a running turn", "broken_running"
    BROKEN_WAITING = "broken for a waiting turn", "broken_waiting"
    BROKEN_STARVED = "broken for a starved turn", "broken_starved"
    """The hold was ended for a turn that waited while no turn ran."""
    SWAPPED = "swapped"
    """At a review, the policy released the blocks, of which the host has a copy."""
    REVIEWED = "reviewed"
    """At a review, the policy released the blocks."""
    ASKED = "asked"
    """The client or the cluster requested the release, or the program ended."""
    SUPERSEDED = "superseded"
    """The program's next turn has another prompt, which can use none of the blocks."""
    MOVED = "moved"
    """The program migrated to another replica."""
    ABORTED = "aborted"
    """The program's turn was aborted."""
    POLICY_SWITCH = "policy switch", "reset"
    CACHE_RESET = "cache reset", "reset"


class LoadFailure(StrEnum):
    """The reason why a copy on the host was not loaded."""

    NO_CONTEXT = "nothing to fetch"
    GONE = "not on the host any more"
    NO_MEMORY = "no room"
    ABORTED = "aborted"
    CACHE_RESET = "cache reset"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnArrived:
    """A turn was accepted. ``last``: the client declared that it is the program's last turn."""

    at_s: float
    last: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler allocated memory for a waiting turn. If the program had a hold, the turn has reused it."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn generated its last token.

    ``tools`` are the tools that it called, and ``served_tokens`` is the number of tokens that were computed for it.
    """

    at_s: float
    tools: tuple[str, ...]
    served_tokens: int
    context_tokens: int = 0
    """Length of the program's context after the turn."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Seconds from the turn's arrival to its last token."""
    on_time: bool = True
    """Whether the turn's TTFT met the SLO."""


@dataclass(frozen=True, slots=True)
class TurnAborted:
    """A turn ended without a result from which the program can continue."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """The policy decided that the blocks stay allocated until ``until_s``."""

    at_s: float
    until_s: float
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Released:
    """The policy decided that the blocks are released."""

    at_s: float
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Swapped:
    """The policy decided that the blocks are released while the host has a copy. If there is a hold, it ends."""

    at_s: float
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Fetched:
    """The copy was loaded to the device and is held until ``until_s``."""

    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The copy was not loaded, but the host still has it."""

    at_s: float
    reason: LoadFailure


@dataclass(frozen=True, slots=True)
class CopyLost:
    """The host no longer has the copy."""

    at_s: float
    reason: LoadFailure


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """A hold ended before the program's next turn used it: it expired, a turn needed the memory, or a request ended
    it.
    """

    at_s: float
    reason: ReleaseReason
    policy_reason: PauseReason | None = None
    """The policy's reason, if it ended the hold at a review; otherwise None."""


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """The executor started the tools of the pause."""

    at_s: float
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """The slowest tool of the pause has finished. The next turn will arrive soon."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The program will have no other turn: its client declared the end, or it was idle for too long."""

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
    """Ask the pause policy, and report Held, Swapped or Released."""


@dataclass(frozen=True, slots=True)
class Observe:
    """Record a pause of this length under this tool key in the duration statistics."""

    tool: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FreeHold:
    """Release the held blocks."""

    reason: ReleaseReason


@dataclass(frozen=True, slots=True)
class Fetch:
    """Load the copy from the host, and report Fetched, FetchFailed or CopyLost."""


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Cancel the load in progress. No event is to be reported for it."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """Record that the program has ended, with its number of turns and the tokens that were computed for them."""

    turns: int
    served_tokens: int = 0


Action = Decide | Observe | FreeHold | Fetch | CancelFetch | Conclude
