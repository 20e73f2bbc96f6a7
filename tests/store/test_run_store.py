"""The log of a run while Redis is well: written once, read by anybody, owned by one ingress at a time."""

import asyncio
from dataclasses import replace

import pytest
import redis.asyncio

from cluster.core.errors import ConfigError, RunLeaseLost, RunLogGap, RunOpen
from cluster.store.runs.records import AlreadyThere, Created, Idempotency, NewRun, Renewal
from cluster.store.runs.store import MAX_PAGE_BYTES, MAX_PAGE_ITEMS, RunStore
from tests.store.conftest import MakeRunStore
from tests.store.outages import eventually

RUN = NewRun("run", "tenant", "program", labels={"model": "tiny"}, secret=b"token")
OPEN = "caesura:v1:{runs}:open"
GONE = b"caesura:v1:{runs}:gone:run"


def items(first: int, end: int) -> list[bytes]:
    return [b"item %d" % number for number in range(first, end)]


def renewal(lost: str = "", unknown: str = "", cancelled: str = "") -> Renewal:
    return Renewal(*(frozenset(names.split()) for names in (lost, unknown, cancelled)))


async def log_of(store: RunStore, run_id: str = "run") -> list[bytes]:
    log = await store.read(run_id)
    assert not log.more and log.length == len(log.items)
    return list(log.items)


async def claim(store: RunStore) -> list[str]:
    """What it can claim as soon as it can claim anything."""

    async def some() -> list[str] | None:
        return await store.claim(10) or None

    return await eventually(some)


async def test_a_run_from_its_creation_to_its_end(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    assert await b.read("run") is None
    assert await a.create(RUN, items(0, 1)) == Created("run")
    await a.append("run", 1, items(1, 3))
    await a.append("run", 3, items(3, 4), status="calling tools")
    log = await b.read("run")
    assert log.items == tuple(items(0, 4))
    head = log.head
    assert (head.id, head.tenant, head.program, head.labels) == ("run", "tenant", "program", {"model": "tiny"})
    assert (head.status, head.open, log.closed) == ("calling tools", True, False)
    assert await b.secret("run") == b"token"
    await a.append("run", 4, items(4, 5), status="completed", final=True)
    log = await b.read("run")
    assert log.items == tuple(items(0, 5))
    assert (log.head.status, log.head.open, log.closed) == ("completed", False, True)
    assert await b.secret("run") is None
    assert log.head.created_s == head.created_s
    assert a.healthy and b.healthy and not a.failures and not b.failures


async def test_an_append_that_is_repeated_changes_nothing(ingress: MakeRunStore) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 2))
    for start, end in [(2, 4), (2, 4), (0, 3), (3, 6), (4, 4), (2, 7)]:
        await a.append("run", start, items(start, end))
    assert await log_of(a) == items(0, 7)
    for _ in range(2):
        await a.append("run", 6, items(6, 8), final=True)
    assert await log_of(a) == items(0, 8)


async def test_an_item_never_gets_another_content(ingress: MakeRunStore) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 2))
    for start, others in [(1, [b"other"]), (0, [*items(0, 1), b"other", b"item 2"])]:
        with pytest.raises(RunLeaseLost):
            await a.append("run", start, others)
    with pytest.raises(RunLeaseLost):
        await a.create(RUN, [*items(0, 1), b"other"])
    assert await log_of(a) == items(0, 2)


async def test_a_log_has_no_gaps(ingress: MakeRunStore) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 2))
    with pytest.raises(RunLogGap) as gap:
        await a.append("run", 3, items(3, 4), final=True)
    assert gap.value.expected == 2
    assert await log_of(a) == items(0, 2)
    await a.append("run", 2, items(2, 4), final=True)
    assert await log_of(a) == items(0, 4)


async def test_a_log_begins_with_an_item_and_only_owners_with_a_name_write(ingress: MakeRunStore) -> None:
    with pytest.raises(ValueError, match="begins with an item"):
        await ingress("a").create(RUN, [])
    with pytest.raises(ValueError, match="numbered from 0"):
        await ingress("a").append("run", -1, items(0, 1))
    with pytest.raises(ValueError, match="name"):
        ingress("")
    with pytest.raises(ConfigError, match=r"redis\.url"):
        ingress("a", url="http://localhost")


# --- owners ---------------------------------------------------------------------------------------------------------


async def test_a_run_whose_ingress_died_goes_on_elsewhere(ingress: MakeRunStore) -> None:
    a, b = ingress("a", lease_s=0.1), ingress("b")
    await a.create(RUN, items(0, 2))
    await a.append("run", 2, items(2, 3))
    # a is silent from here on.
    assert await claim(b) == ["run"]
    assert await b.secret("run") == b"token"
    await b.append("run", 3, [b"taken over", *items(4, 5)])
    # a wakes up, and repeats what it does not know to be done.
    with pytest.raises(RunLeaseLost):
        await a.append("run", 2, items(2, 4))
    with pytest.raises(RunLeaseLost):
        await a.create(RUN, items(0, 3))
    with pytest.raises(RunLeaseLost):
        await a.append("run", 3, items(3, 4), final=True)
    assert await a.renew(["run"]) == renewal(lost="run")
    await a.release(["run"])
    assert await b.renew(["run"]) == renewal()
    await b.append("run", 5, items(5, 6), final=True)
    assert await log_of(a) == [*items(0, 3), b"taken over", *items(4, 6)]


async def test_renewal_keeps_a_run(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 1))
    await direct.zadd(OPEN, {"run": 1})
    assert await a.renew(["run"]) == renewal()
    assert await b.claim(10) == []
    assert await a.renew([]) == renewal()


async def test_a_lease_that_ended_unnoticed_is_still_the_owners(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 1))
    await direct.zadd(OPEN, {"run": 1})
    assert await a.claim(10, ["run", "other"]) == [], "a works on it already"
    await a.append("run", 1, items(1, 2))
    assert await b.claim(10) == ["run"]


async def test_what_an_ingress_works_on_leaves_room_for_what_it_claims(ingress: MakeRunStore) -> None:
    a = ingress("a")
    for run_id in ("x", "y", "z"):
        await a.create(NewRun(run_id, "tenant", "program"), items(0, 1))
        await a.release([run_id])
    assert len(await a.claim(1, ["x", "y"])) == 1
    assert await a.claim(10, ["y"]) == ["x"]
    assert await a.claim(0) == []
    assert await a.claim(10) == ["y"]


async def test_a_run_is_not_lost_by_being_closed(ingress: MakeRunStore) -> None:
    """Its owner may renew it before it has heard that the end was written."""
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 1))
    await a.append("run", 1, items(1, 2), final=True)
    assert await a.renew(["run"]) == renewal()
    assert await b.claim(1) == []
    assert await b.renew(["run"]) == renewal(lost="run")


async def test_what_is_released_can_be_claimed_at_once(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    for run_id in ("x", "y", "z"):
        await a.create(NewRun(run_id, "tenant", "program"), items(0, 1))
    await b.release(["z"])
    assert await b.claim(10) == []
    await a.release(["x", "y"])
    assert sorted(await b.claim(1) + await b.claim(10)) == ["x", "y"]
    with pytest.raises(RunLeaseLost):
        await a.append("x", 1, items(1, 2))
    assert await a.renew(["x", "y", "z"]) == renewal(lost="x y")


async def test_who_released_a_run_can_claim_it_again(ingress: MakeRunStore) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 1))
    await a.release(["run"])
    with pytest.raises(RunLeaseLost):
        await a.append("run", 1, items(1, 2))
    assert await a.claim(10) == ["run"]
    await a.append("run", 1, items(1, 2))


async def test_two_that_claim_at_once_get_different_runs(ingress: MakeRunStore) -> None:
    a, b, c = (ingress(name) for name in "abc")
    names = [f"run-{number}" for number in range(40)]
    for name in names:
        await a.create(NewRun(name, "tenant", "program"), items(0, 1))
    await a.release(names)
    claimed = await asyncio.gather(*(store.claim(7) for store in (b, c) * 4))
    assert sorted(run_id for ids in claimed for run_id in ids) == sorted(names)


async def test_cancellation_is_told_with_the_renewal(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 1))
    await a.create(NewRun("other", "tenant", "program"), items(0, 1))
    assert await b.ask_cancel("run") is True
    assert (await b.read("run")).head.cancel_asked
    assert await a.renew(["run", "other"]) == renewal(cancelled="run")
    await a.release(["run"])
    assert await b.claim(1) == ["run"]
    assert await b.renew(["run"]) == renewal(cancelled="run")
    await b.append("run", 1, items(1, 2), status="cancelled", final=True)
    assert await a.ask_cancel("run") is False
    assert await a.ask_cancel("unknown") is False


# --- idempotency ----------------------------------------------------------------------------------------------------


async def test_a_request_that_is_sent_again_finds_its_run(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    first, again = (NewRun(name, "tenant", "program", idempotency=Idempotency("key", b"body")) for name in "12")
    other_body = NewRun("3", "tenant", "program", idempotency=Idempotency("key", b"another body"))
    other_tenant = NewRun("4", "tenant 2", "program", idempotency=Idempotency("key", b"body"))
    assert await a.create(first, items(0, 1)) == Created("1")
    assert await b.create(again, items(0, 1)) == AlreadyThere("1", same_body=True)
    assert await b.create(other_body, items(0, 1)) == AlreadyThere("1", same_body=False)
    assert await b.create(other_tenant, items(0, 1)) == Created("4")
    assert await a.create(first, items(0, 1)) == Created("1"), "repeated"
    await a.append("1", 1, items(1, 2), final=True)
    assert await b.create(again, items(0, 1)) == AlreadyThere("1", same_body=True)
    assert await b.read("2") is None and await b.read("3") is None
    await b.delete("1")
    assert await b.create(again, items(0, 1)) == Created("2")


async def test_of_requests_at_once_with_one_key_one_runs(ingress: MakeRunStore) -> None:
    stores = [ingress(name) for name in "abcd"]
    key = Idempotency("key", b"body")
    runs = [NewRun(f"run-{number}", "tenant", "program", idempotency=key) for number in range(40)]
    answers = await asyncio.gather(*(stores[i % 4].create(run, items(0, 1)) for i, run in enumerate(runs)))
    (winner,) = (answer.run_id for answer in answers if isinstance(answer, Created))
    others = [answer for answer in answers if answer != Created(winner)]
    assert others == [AlreadyThere(winner, same_body=True)] * 39
    assert [head.id for head in await stores[0].runs("tenant")] == [winner]


# --- pages and lists ------------------------------------------------------------------------------------------------


async def test_a_log_is_read_in_pages(ingress: MakeRunStore) -> None:
    a = ingress("a")
    many = items(0, 2 * MAX_PAGE_ITEMS + 10)
    await a.create(RUN, many)
    found, lengths, log = [], [], None
    while log is None or log.more:
        log = await a.read("run", len(found))
        found += log.items
        lengths.append(len(log.items))
    assert (found, lengths) == (many, [MAX_PAGE_ITEMS, MAX_PAGE_ITEMS, 10])
    for start, limit, expected in [(5, 2, many[5:7]), (len(many), None, []), (len(many) + 5, 1, []), (0, 0, [])]:
        assert list((await a.read("run", start, limit)).items) == expected


async def test_a_page_is_bounded_in_bytes_but_has_an_item(ingress: MakeRunStore) -> None:
    a = ingress("a")
    large, half = bytes(MAX_PAGE_BYTES + 1), bytes(MAX_PAGE_BYTES // 2)
    await a.create(RUN, [large, half, half, b"1"])
    lengths = [[len(item) for item in (await a.read("run", start)).items] for start in range(4)]
    assert lengths == [[len(large)], [len(half)] * 2, [len(half), 1], [1]]


async def test_lists_are_by_tenant_and_program_the_newest_first(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    places = [("t", "p"), ("t", "q"), ("t/p", ""), ("t", "p"), ("", "t/p"), ("t\ud800", "\0"), ("t", "p")]
    for number, (tenant, program) in enumerate(places):
        await a.create(NewRun(str(number), tenant, program, labels={"number": str(number)}), items(0, 1))
    for tenant, program in places:
        same = [str(i) for i, place in enumerate(places) if place == (tenant, program)][::-1]
        heads = await b.runs(tenant, program=program)
        assert [(head.id, head.tenant, head.program) for head in heads] == [(i, tenant, program) for i in same]
    heads = await b.runs("t")
    assert [head.id for head in heads] == ["6", "3", "1", "0"]
    assert [head.labels["number"] for head in heads] == ["6", "3", "1", "0"]
    pages, before = [], None
    while page := await b.runs("t", limit=3, before=before):
        pages.append([head.id for head in page])
        before = page[-1].created_s
    assert pages == [["6", "3", "1"], ["0"]]
    assert await b.runs("t", limit=0) == await b.runs("nobody") == []


# --- the end --------------------------------------------------------------------------------------------------------


async def test_an_open_run_cannot_be_deleted_and_a_closed_one_leaves_nothing(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a = ingress("a")
    await a.create(NewRun("run", "tenant", "program", idempotency=Idempotency("key", b"body")), items(0, 1))
    with pytest.raises(RunOpen):
        await a.delete("run")
    await a.append("run", 1, [], final=True)
    assert await a.delete("run") is True
    assert await direct.keys("*") == [GONE]
    assert await a.delete("run") is False
    with pytest.raises(RunLeaseLost):
        await a.append("run", 1, items(1, 2))
    assert await a.read("run") is None and await a.runs("tenant") == []


async def test_a_run_with_a_key_can_be_kept_and_is_found_by_the_key(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(replace(RUN, idempotency=Idempotency("key", b"body")), items(0, 1))
    assert (await b.keyed("tenant", "key"), await b.keyed("another", "key")) == ("run", None)
    await a.append("run", 1, items(1, 2), final=True)
    assert not await b.delete("run", unless_keyed=True)
    assert await b.keyed("tenant", "key") == "run"
    assert await b.delete("run")
    assert await b.keyed("tenant", "key") is None
    await a.create(replace(RUN, id="other"), items(0, 1))
    await a.append("other", 1, items(1, 2), final=True)
    assert await b.delete("other", unless_keyed=True)


async def test_a_rejected_creation_leaves_nothing(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(replace(RUN, idempotency=Idempotency("key", b"body")), items(0, 1))
    assert not await b.renounce("run")  # it is another's
    assert await a.renounce("run")
    assert not await a.renounce("run")
    assert await direct.keys("caesura:v1:{runs}:*") == [GONE]


@pytest.mark.parametrize("how", ["delete", "evict", "renounce", "renounce before its creation"])
async def test_a_run_that_is_deleted_is_lost_to_its_former_owner_for_ten_minutes(
    ingress: MakeRunStore, direct: redis.asyncio.Redis, how: str
) -> None:
    a, b = ingress("a"), ingress("b")
    if how == "renounce before its creation":
        assert not await a.renounce("run")
    else:
        await a.create(RUN, items(0, 1))
    if how == "renounce":
        assert await a.renounce("run")
    elif how in ("delete", "evict"):
        await a.append("run", 1, [], final=True)
        assert await (b.delete("run") if how == "delete" else b.evict(1))
    for call in (a.append("run", 1, items(1, 2)), a.create(RUN, items(0, 2)), b.create(RUN, items(0, 2))):
        with pytest.raises(RunLeaseLost):
            await call
    assert await a.renew(["run", "another"]) == renewal(lost="run", unknown="another")
    assert await direct.keys("*") == [GONE]
    assert 500_000 < await direct.pttl(GONE) <= 600_000


async def test_a_rejected_creation_stays_if_the_request_came_again(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    keyed = replace(RUN, idempotency=Idempotency("key", b"body"))
    await a.create(keyed, items(0, 1))
    assert isinstance(await b.create(replace(keyed, id="again"), items(0, 1)), AlreadyThere)
    assert not await a.renounce("run")
    assert await b.claim(1) == ["run"]
    assert await log_of(b) == items(0, 1)


async def test_a_creation_that_must_not_stay_is_undone_although_the_request_came_again(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    keyed = replace(RUN, idempotency=Idempotency("key", b"body"))
    await a.create(keyed, items(0, 1))
    assert isinstance(await b.create(replace(keyed, id="again"), items(0, 1)), AlreadyThere)
    assert await a.renounce("run", although_repeated=True)
    assert await b.create(replace(keyed, id="again"), items(0, 1)) == Created("again")


async def test_a_request_that_came_again_is_found_by_its_key(ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    again = Idempotency("key", b"body")
    assert await b.repeated("tenant", again) is None
    await a.create(replace(RUN, idempotency=again), items(0, 1))
    assert await b.repeated("another", again) is None
    assert await b.repeated("tenant", again) == AlreadyThere("run", same_body=True)
    assert await b.repeated("tenant", Idempotency("key", b"other")) == AlreadyThere("run", same_body=False)
    assert not await a.renounce("run"), "it is the answer to the request that came again"
    await a.create(replace(RUN, id="other", idempotency=Idempotency("other", b"body")), items(0, 1))
    await a.append("other", 1, items(1, 2), final=True)
    assert await b.repeated("tenant", Idempotency("other", b"body")) == AlreadyThere("other", same_body=True)
    assert await b.delete("other")
    assert await b.repeated("tenant", Idempotency("other", b"body")) is None


async def test_everything_of_a_closed_run_expires_and_nothing_of_an_open_one(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a = ingress("a", retention_s=1000.0)
    for name in ("open", "closed"):
        await a.create(NewRun(name, "tenant", "program", idempotency=Idempotency(name, b"body")), items(0, 1))
    await a.append("closed", 1, items(1, 2), final=True)
    for key in await direct.keys("*"):
        left_ms = await direct.pttl(key)
        if key.endswith(b"closed"):
            assert 500_000 < left_ms <= 1_000_000, key
        else:
            assert left_ms == -1, key


async def test_expired_runs_leave_the_lists(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a = ingress("a", retention_s=0.05)
    for name in ("x", "y"):
        await a.create(NewRun(name, "tenant", name), items(0, 1))
        await a.append(name, 1, [], final=True)

    async def gone() -> bool | None:
        return None if await a.read("x") or await a.read("y") else True

    await eventually(gone)
    assert await a.runs("tenant") == []

    async def swept() -> bool | None:
        await a.claim(1)
        return True if await direct.keys("*") == [] else None

    await eventually(swept)
