"""A turn's call: placed again where its replica is gone, its place given up exactly once, however it ends."""

from collections.abc import Iterable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster.core.errors import HttpError, Overloaded, ProgramMoved, ReplicaGone, UpstreamFailed
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.replica_snapshot import Home, prefix_blocks
from cluster.core.stream import Progress, StreamChunk
from cluster.dispatch import failover
from cluster.dispatch.failover import FailoverStream, ends_answer
from cluster.dispatch.placed_calls import (
    IMAGE_TOKENS,
    MAX_HOPS,
    FailoverAttempts,
    PlacedStream,
    prompt_tokens,
    turn_request,
)
from router.decisions import TurnRequest
from router.placement import Placement
from tests import garbage
from tests.waiting import until

DIED = ActorDiedError()
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
UNREACHABLE = ActorUnavailableError("a while", None)


class Pieces:
    """A call that says these, or raises them."""

    def __init__(self, said: Iterable[Any]) -> None:
        self._said = iter(said)
        self.cancelled = False

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> Any:
        for piece in self._said:
            if isinstance(piece, Exception) and not isinstance(piece, HttpError):
                raise piece
            return piece
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class Recorder:
    """Placer that note what becomes of them: first on r0, then on r1, ..."""

    def __init__(self) -> None:
        self.placed: list[Placement] = []
        self.ends: list[tuple[str, bool, int | None]] = []
        self.fences: list[tuple[str, int | None]] = []

    async def place(self, request: TurnRequest) -> Placement:
        number = len(self.placed)
        home = Home(f"r{number}", number + 1)
        self.placed.append(Placement(self, request, home.replica, home, f"turn-{number}"))
        return self.placed[-1]

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        self.ends.append((placement.session, complete, context_tokens))

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        self.fences.append((placement.session, epoch))

    async def session_of(self, key: str, *, fresh: bool = False) -> str | None:
        return key

    def forget(self, key: str) -> None:
        raise AssertionError(key)

    def view(self) -> dict[str, Any]:
        return {}


class Turn:
    """A turn whose calls say these, one after the other."""

    def __init__(self, *calls: Iterable[Any]) -> None:
        self.places = Recorder()
        self.calls = [Pieces(said) for said in calls]
        left = iter(self.calls)
        request = turn_request(ProgramIdentity("p"), {"prompt": "x"})
        self.answers: PlacedStream[Any] = PlacedStream(self.places, request, lambda placement: next(left))

    async def all(self) -> list[Any]:
        return [piece async for piece in self.answers]


async def test_a_whole_answer_gives_its_place_up_once() -> None:
    turn = Turn([b"a", b"b"])
    assert await turn.all() == [b"a", b"b"]
    turn.answers.over()
    turn.answers.cancel()
    assert turn.places.ends == [("r0", True, None)]


@pytest.mark.parametrize("end", ["over", "cancel"])
async def test_an_answer_that_is_left_gives_its_place_up(end) -> None:
    turn = Turn([b"a", b"b"])
    assert await anext(turn.answers) == b"a"
    getattr(turn.answers, end)()
    assert turn.places.ends == [("r0", end == "over", None)]
    assert turn.calls[0].cancelled is (end == "cancel")


async def test_a_turn_that_was_never_begun_has_no_place() -> None:
    turn = Turn([b"a"])
    turn.answers.cancel()
    assert turn.places.placed == [] and turn.places.ends == []


@pytest.mark.parametrize("error", [Overloaded("no"), UpstreamFailed("died")])
async def test_a_refusal_is_an_end_that_is_not_proper(error) -> None:
    turn = Turn([error])
    assert await anext(turn.answers) is error
    assert turn.places.ends == [("r0", False, None)]


@pytest.mark.parametrize(("error", "avoided"), [(Overloaded("full"), frozenset()), (UpstreamFailed("died"), {"r0"})])
async def test_a_replica_that_is_only_full_is_not_avoided(error: HttpError, avoided: frozenset[str]) -> None:
    turn = Turn([error])
    assert await anext(turn.answers) is error
    assert turn.answers.elsewhere.avoid == avoided


async def test_a_replica_that_is_gone_is_avoided() -> None:
    turn = Turn(*([ReplicaGone(replica)] for replica in ("r0", "r1", "r2")), [b"a"])
    assert await turn.all() == [b"a"]
    assert [placement.request.avoid for placement in turn.places.placed] == [
        frozenset(),
        {"r0"},
        {"r0", "r1"},
        {"r0", "r1", "r2"},
    ]
    assert turn.places.ends == [("r0", False, None), ("r1", False, None), ("r2", False, None), ("r3", True, None)]


@pytest.mark.parametrize("error", [DIED, UNREACHABLE])
async def test_a_death_is_told_to_whoever_asked_and_the_next_attempt_avoids_that_replica(error) -> None:
    places, calls = Recorder(), [Pieces([ReplicaGone("r0")]), Pieces([b"a", error]), Pieces([b"b"])]
    told: list[Progress | None] = []

    def call(placement: Placement, so_far: Progress | None) -> Pieces:
        told.append(so_far)
        return calls[len(told) - 1]

    checks = []

    async def check() -> None:
        checks.append(1)

    asked = []

    async def request() -> TurnRequest:
        asked.append(1)
        return turn_request(ProgramIdentity("p"), {"prompt": "x"})

    attempts = FailoverAttempts(places, request, call, check)
    first = await attempts(None)
    assert await anext(first) == b"a"
    with pytest.raises(type(error)):
        await anext(first)
    first.cancel()
    second = await attempts(Progress(1))
    assert [piece async for piece in second] == [b"b"]
    attempts.over(context_tokens=3)
    assert told == [None, None, Progress(1)]
    assert [placement.request.avoid for placement in places.placed] == [frozenset(), {"r0"}, {"r0", "r1"}]
    assert places.ends == [("r0", False, None), ("r1", False, None), ("r2", True, None)]
    assert (len(checks), len(asked)) == (2, 1)


@pytest.mark.parametrize("end", [[], [DIED]], ids=["ends", "breaks"])
async def test_a_whole_answer_gives_its_place_up_at_its_last_piece_however_its_call_ends(end: list[Exception]) -> None:
    places, last = Recorder(), b"data: [DONE]\n\n"
    call = Pieces([StreamChunk(Progress(1), last), *end])

    async def request() -> TurnRequest:
        return turn_request(ProgramIdentity("p"), {"prompt": "x"})

    async def nothing() -> None:
        """Nothing refuses it, and nothing is blamed."""

    def as_http_error(error: BaseException) -> HttpError:
        raise error

    attempts = FailoverAttempts(places, request, lambda placement, so_far: call, nothing)
    answer: FailoverStream[bytes] = FailoverStream(attempts, ends=ends_answer, error_map=as_http_error, blame=nothing)
    assert [piece async for piece in answer] == [last]
    answer.cancel()
    assert places.ends == [("r0", True, None)]
    await until(lambda: not failover._finishing)
    assert places.ends == [("r0", True, None)]


async def test_a_turn_leaves_no_garbage() -> None:
    """It has its prompt, its spans and its connection to the replica."""
    places = Recorder()

    async def request() -> TurnRequest:
        return turn_request(ProgramIdentity("p"), {"prompt": "x"})

    async def check() -> None:
        """Nothing refuses it."""

    with garbage.none_of():
        for _ in range(garbage.TIMES):
            answers = await FailoverAttempts(places, request, lambda placement, so_far: Pieces([b"a"]), check)(None)
            assert [piece async for piece in answers] == [b"a"]
            del answers


async def test_a_program_that_has_moved_is_followed() -> None:
    turn = Turn([ProgramMoved("left", epoch=5)], [ProgramMoved("left")], [b"a"])
    assert await turn.all() == [b"a"]
    assert turn.places.fences == [("r0", 5), ("r1", None)]
    assert [complete for _, complete, _ in turn.places.ends] == [False, False, True]


async def test_nothing_goes_round_for_ever() -> None:
    moved = Turn(*([ProgramMoved("left")] for _ in range(MAX_HOPS + 9)))
    assert isinstance(await anext(moved.answers), ProgramMoved)
    gone = Turn(*([ReplicaGone("gone")] for _ in range(MAX_HOPS + 9)))
    with pytest.raises(ReplicaGone):
        await gone.all()
    gone.answers.cancel()
    assert len(moved.places.ends) == len(gone.places.ends) == MAX_HOPS + 1


async def test_what_breaks_later_is_the_clients_to_see() -> None:
    turn = Turn([b"a", DIED], [b"never"])
    assert await anext(turn.answers) == b"a"
    with pytest.raises(ActorDiedError):
        await anext(turn.answers)
    turn.answers.cancel()
    assert turn.places.ends == [("r0", False, None)]


# --- what the router is asked -----------------------------------------------------------------------------------------


def test_the_request_says_who_and_how_much() -> None:
    identity = ProgramIdentity("p", "mother", tenant="t", first_turn=True, last_turn=True, hints=Hints(priority=1))
    body = {"messages": [{"role": "user", "content": "word " * 200}], "tools": [{"type": "function"}]}
    asked = turn_request(identity, body)
    assert (asked.key, asked.parent_key, asked.tenant) == ("t/p", "t/mother", "t")
    assert (asked.single_turn, asked.first, asked.last) == (False, True, True)
    assert asked.hints == identity.hints
    assert 250 <= asked.prompt_tokens <= 270
    assert len(asked.prefix) == 4


def test_turns_of_no_program_have_names_that_nothing_else_has() -> None:
    asked = [turn_request(ProgramIdentity(), {"prompt": "x"}) for _ in range(50)]
    assert all(one.single_turn for one in asked)
    assert len({one.key for one in asked}) == 50


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": list(range(700))}, 700),
        ({"prompt": "x" * 40}, 10),
        ({"prompt": "\u4e2d\ud800" * 4}, 6),
        ({"prompt": ["x" * 8, "y" * 8]}, 4),
        ({"prompt": [[1, 2], [3]]}, 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 36}, None, 3.5]}]}, 11),
        ({"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "x" * 36}]}]}, IMAGE_TOKENS + 11),
        ({"messages": [{"role": "user", "content": [{"image_url": IMAGE["image_url"]["url"]}]}]}, IMAGE_TOKENS + 1),
        ({"tools": [{"image_url": {"type": "x" * 40}}]}, 10),
        ({"messages": "nonsense"}, 2),
        ({}, 0),
    ],
)
def test_prompts_are_measured_or_estimated(body, tokens) -> None:
    assert prompt_tokens(body) == tokens


def test_the_prefix_of_token_ids_is_exact() -> None:
    prompt = list(range(200))
    assert turn_request(ProgramIdentity("p"), {"prompt": prompt}).prefix == prefix_blocks(prompt)
