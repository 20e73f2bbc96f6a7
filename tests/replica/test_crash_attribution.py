"""The request that is suspected if the engine dies now, and when nobody is."""

import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from replicas.crash_attribution import SIZE, SharedSuspect, died_by_itself, shared_suspect
from replicas.virtual_engine import VirtualEngine

Replica = Callable[..., VirtualEngine]
SYNC_AND_ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def suspect() -> Iterator[SharedSuspect]:
    with shared_suspect() as shared:
        yield shared


@SYNC_AND_ASYNC
def test_the_only_turn_without_a_token_is_suspected_or_else_the_only_turn(
    replica: Replica, suspect: SharedSuspect, asynchronous: bool
) -> None:
    engine = replica(asynchronous=asynchronous)
    assert suspect.request_id is None
    seen = []
    for arrives in ["a", None, None, "b", "c", None, None]:
        if arrives is not None:
            engine.submit(arrives, [ord(arrives)] * 20, 20)
        engine.step()
        seen.append(suspect.request_id)
    # a alone; b's prompt beside it; c's, when b has a token (an asynchronous engine hears of it a step later); none.
    if asynchronous:
        assert seen == ["a", "a", "a", "b", None, "c", None]
    else:
        assert seen == ["a", "a", "a", "b", "c", None, None]


def test_nobody_is_suspected_without_a_replica_that_asks(replica: Replica) -> None:
    engine = replica()
    engine.submit("a", [1] * 20, 20)
    assert engine.step().num_scheduled_tokens == {"a": 20}


def test_a_name_is_the_id_but_for_what_vllm_adds(suspect: SharedSuspect) -> None:
    suspect.write("cmpl-1-0-1a2b3c4d")
    assert suspect.is_turn("cmpl-1-0")
    assert not suspect.is_turn("cmpl-1")
    suspect.write("x" * (SIZE + 1))
    assert suspect.request_id is None
    assert not suspect.is_turn("")


@pytest.mark.parametrize(
    ("found_dead", "exit_code", "by_itself"),
    [
        (None, -signal.SIGTERM, True),  # it said so; what its process was sent then does not count
        ("core", 1, True),
        ("core", -signal.SIGABRT, True),
        ("core", -signal.SIGSEGV, True),
        ("core", -signal.SIGKILL, False),
        ("core", -signal.SIGTERM, False),
    ],
)
def test_an_engine_that_is_killed_from_outside_did_not_die_by_itself(
    found_dead: str | None, exit_code: int, by_itself: bool
) -> None:
    manager = SimpleNamespace(failed_proc_name=found_dead, processes=[SimpleNamespace(name="core", exitcode=exit_code)])
    client = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)))
    assert died_by_itself(client) is by_itself
