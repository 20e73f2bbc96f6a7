"""A engine that does what a test has written, and says what was done to it. Only the real one places well."""

from collections.abc import Callable, Mapping, Sequence

from cluster.core.replica_snapshot import ReplicaSnapshot
from router.decisions import Decision, Go, Home, Placed, Refuse, TurnRequest, Wait

Choose = Callable[[TurnRequest], Decision]


class ScriptedEngine:
    """Known programs stay, unless their replica is gone or has failed the turn; new ones go where `choose` says."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.pick = min
        self.homes: dict[str, Home] = {}
        self.replicas: Mapping[str, ReplicaSnapshot | None] = {}
        self.in_flight: dict[str, TurnRequest] = {}
        self.over: list[str] = []
        self.waiting: dict[str, str] = {}
        self.asked: list[tuple[str, bool]] = []
        self.outcomes: list[tuple[str, Go | Refuse]] = []
        self.forgotten: list[str] = []

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None], now_s: float) -> None:
        self.replicas = snapshots

    def turn(self, turn_id: str, request: TurnRequest, now_s: float, *, store_available: bool = True) -> Decision:
        assert self.in_flight.get(turn_id, request) is request and turn_id not in self.over
        self.in_flight[turn_id] = request
        self.asked.append((request.key, store_available))
        home = self.homes.get(request.key)
        if home is None:
            decision = self.choose(request)
        elif home.replica in self.replicas and home.replica not in request.avoid:
            decision = Go(home, Placed.STAYED)
        else:
            other = self.pick(replica for replica in self.replicas if replica not in request.avoid)
            decision = Go(Home(other, home.epoch + 1), Placed.MOVED_FROM_LOST, home.replica)
        if isinstance(decision, Go) and not request.single_turn:
            self.homes[request.key] = decision.home
        if isinstance(decision, Wait):
            self.waiting[turn_id] = request.key
        return decision

    def admitted(self, now_s: float) -> Sequence[tuple[str, Go | Refuse]]:
        told, self.outcomes = self.outcomes, []
        return told

    def settle(self, key: str, home: Home, now_s: float) -> None:
        self.homes[key] = home
        for turn_id in [one for one, waits in self.waiting.items() if waits == key]:
            del self.waiting[turn_id]
            self.outcomes.append((turn_id, Go(home, Placed.JOINED)))

    def start_s(self, now_s: float) -> float | None:
        return 0.0 if self.replicas else None

    def home_of(self, key: str) -> Home | None:
        return self.homes.get(key)

    def ended(self, turn_id: str, now_s: float, *, context_tokens: int | None = None) -> None:
        request = self.in_flight.pop(turn_id)
        self.waiting.pop(turn_id, None)
        self.over.append(turn_id)
        if request.last and all(other.key != request.key for other in self.in_flight.values()):
            self.homes.pop(request.key, None)  # as the real one does, whatever the turn's outcome

    def forget(self, key: str, now_s: float) -> None:
        self.homes.pop(key, None)
        self.forgotten.append(key)


def at(replica: str, epoch: int = 1) -> Choose:
    """New programs go there."""
    return lambda request: Go(Home(replica, epoch), Placed.NEW)
