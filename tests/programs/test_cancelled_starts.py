"""Clients that leave while the store accepts their run: nothing is run for nobody."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from cluster.core.errors import Overloaded, RunStoreUnavailable
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.records import AlreadyThere, Created, Idempotency, NewRun
from cluster.store.runs.store import RunStore
from tests.programs.runners import LEASE_S, Runners
from tests.programs.scripted_runs import ScriptedReplicas, says
from tests.programs.test_runner import ended, outcome, spec
from tests.waiting import until


async def leave(
    runner: ProgramRunner,
    store: RunStore,
    run_id: str,
    idempotency: Idempotency | None = None,
    admit: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Start a run, and be cancelled when the store has accepted it and before its answer comes."""
    create, accepted = store.create, asyncio.Event()

    async def late(run: NewRun, items: Sequence[bytes]) -> Created | AlreadyThere:
        created = await create(run, items)
        accepted.set()
        await asyncio.Event().wait()
        return created

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "create", late)
        starting = asyncio.create_task(runner.start(spec(run_id), idempotency=idempotency, admit=admit))
        await accepted.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_a_run_whose_client_left_while_it_was_accepted_is_gone(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("for nobody")])
    runner, other = runners(ScriptedReplicas([])), runners(replicas)
    await leave(runner, runners.stores[0], "left")
    await until(lambda: not runner.uncertain_starts)
    assert await other.load("left", "t") is None
    other.attend()
    await asyncio.sleep(2 * LEASE_S)
    assert not replicas.asked


async def test_a_run_with_a_key_stays_for_its_client(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("here you are")])
    runner, other = runners(ScriptedReplicas([])), runners(replicas)
    key = Idempotency("stays", b"body")
    await leave(runner, runners.stores[0], "kept", key)
    assert not runner.uncertain_starts
    started = await other.start(spec("again"), idempotency=key)
    assert (started.run_id, started.new) == ("kept", False)
    other.attend()
    assert outcome(await ended(other, "kept")).status == "completed"


async def test_a_run_whose_client_left_before_it_was_admitted_is_gone_although_it_has_a_key(runners: Runners) -> None:
    runner, other = runners(ScriptedReplicas([])), runners(ScriptedReplicas([says("anew")]))
    key, asked = Idempotency("admitted", b"body"), asyncio.Event()

    async def admit() -> None:
        asked.set()
        await asyncio.Event().wait()

    starting = asyncio.create_task(runner.start(spec("first"), idempotency=key, admit=admit))
    await asked.wait()
    assert runner.open_runs == 0
    # The client has come again meanwhile.
    assert await other.repeated("t", key) == "first"
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await other.load("first", "t") is None
    started = await other.start(spec("second"), idempotency=key)
    assert started.new
    assert outcome(await ended(other, "second")).status == "completed"


async def never() -> None:
    raise AssertionError("nobody waits for this run any more")


async def test_a_run_with_a_key_that_was_not_admitted_does_not_stay_for_its_client(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("not in its conversation")])
    runner, other = runners(ScriptedReplicas([])), runners(replicas)
    key = Idempotency("unadmitted", b"body")
    await leave(runner, runners.stores[0], "unadmitted", key, never)
    # The client has come again before the creation is undone.
    assert await other.repeated("t", key) == "unadmitted"
    await until(lambda: not runner.uncertain_starts)
    assert await other.load("unadmitted", "t") is None
    other.attend()
    await asyncio.sleep(2 * LEASE_S)
    assert not replicas.asked


async def test_a_run_whose_acceptance_is_uncertain_and_that_was_not_admitted_does_not_stay(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, other = runners(ScriptedReplicas([])), runners(ScriptedReplicas([]))
    create, key = runners.stores[0].create, Idempotency("uncertain", b"body")

    async def unanswered(run: NewRun, items: Sequence[bytes]) -> Created | AlreadyThere:
        await create(run, items)
        raise RunStoreUnavailable("it does not answer", "timeout")

    monkeypatch.setattr(runners.stores[0], "create", unanswered)
    with pytest.raises(Overloaded):
        await runner.start(spec("uncertain"), idempotency=key, admit=never)
    assert await other.repeated("t", key) == "uncertain"
    await until(lambda: not runner.uncertain_starts)
    assert await other.load("uncertain", "t") is None
