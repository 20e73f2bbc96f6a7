"""Requests under which replicas died are refused for a while, whoever asks."""

import asyncio

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import Quarantined
from cluster.dispatch.quarantine import REMEMBERED, Quarantine, digest_of

BODY = {"model": "tiny", "prompt": "Once", "temperature": 0.0}


class Shared:
    """What several ingresses have in common."""

    def __init__(self, answers: bool = True) -> None:
        self.known: dict[str, float] = {}
        self.asked = 0
        self._answers = answers
        self._added = asyncio.Event()
        self.healthy = True

    async def quarantine(self, digest: str, ttl_s: float) -> bool | None:
        if self._answers:
            self.known[digest] = ttl_s
            self._added.set()
        return True if self._answers else None

    async def quarantined_after(self, entry: str) -> tuple[str, list[str]] | None:
        if not self._answers:
            return None
        if entry != "0" and len(self.known) <= int(entry):
            self._added.clear()
            await self._added.wait()
        return str(len(self.known)), list(self.known)[int(entry) :]

    async def is_quarantined(self, digest: str) -> bool | None:
        self.asked += 1
        return digest in self.known if self._answers else None


def test_the_digest_is_of_what_is_asked() -> None:
    digest = digest_of("completions", "a", BODY)
    assert digest == digest_of("completions", "a", dict(reversed(BODY.items())) | {"user": "me", "stream": True})
    assert digest != digest_of("chat", "a", BODY)
    assert digest != digest_of("completions", "b", BODY)
    assert digest != digest_of("completions", "a", BODY | {"prompt": "Twice"})


@pytest.mark.parametrize("strange", ["\ud800", 2**70, [[1], {"x": None}], float("nan")])
def test_any_body_has_a_digest(strange: object) -> None:
    assert digest_of("chat", "\ud800", {"x": strange}) == digest_of("chat", "\ud800", {"x": strange})


async def test_it_is_refused_until_the_time_is_over() -> None:
    clock = ManualClock()
    quarantine = Quarantine(clock, 600.0)
    await quarantine.check(lambda: "bad")
    await quarantine.add("bad")
    await quarantine.check(lambda: "good")
    clock.advance(599.0)
    with pytest.raises(Quarantined) as refusal:
        await quarantine.check(lambda: "bad")
    assert (refusal.value.status, refusal.value.code) == (422, "quarantined")
    clock.advance(1.0)
    await quarantine.check(lambda: "bad")


async def test_other_ingresses_refuse_it_too_while_the_store_answers() -> None:
    shared = Shared()
    first, second = (Quarantine(ManualClock(), 600.0, shared) for _ in range(2))
    await first.add("bad")
    assert shared.known == {"bad": 600.0}
    with pytest.raises(Quarantined):
        await second.check(lambda: "bad")
    shared.healthy = False
    await second.check(lambda: "bad")
    alone = Quarantine(ManualClock(), 600.0, Shared(answers=False))
    await alone.check(lambda: "bad")
    await alone.add("bad")
    with pytest.raises(Quarantined):
        await alone.check(lambda: "bad")


async def test_an_ingress_that_follows_asks_only_for_what_some_ingress_has_added() -> None:
    shared = Shared()
    first, second = (Quarantine(ManualClock(), 600.0, shared) for _ in range(2))
    await first.add("old")
    following = asyncio.create_task(second.follow())
    await asyncio.sleep(0)
    asked = shared.asked
    await second.check(lambda: "good")
    assert shared.asked == asked
    with pytest.raises(Quarantined):
        await second.check(lambda: "old")
    await first.add("new")
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(Quarantined):
        await second.check(lambda: "new")
    del shared.known["new"]  # its time is over
    await second.check(lambda: "new")
    following.cancel()


async def test_an_ingress_that_cannot_follow_asks_for_each_request() -> None:
    shared = Shared(answers=False)
    quarantine = Quarantine(ManualClock(), 600.0, shared)
    following = asyncio.create_task(quarantine.follow())
    await asyncio.sleep(0)
    await quarantine.check(lambda: "good")
    assert shared.asked == 1
    following.cancel()


def no_digest() -> str:
    raise AssertionError("a digest of 8 MB takes the event loop 20 ms")


@pytest.mark.parametrize("listed", [False, True])
async def test_no_digest_is_made_when_nothing_is_in_quarantine_any_more(listed: bool) -> None:
    clock, shared = ManualClock(), Shared()
    quarantine, other = Quarantine(clock, 600.0, shared), Quarantine(clock, 600.0, shared)
    await other.add("old")
    following = asyncio.create_task(quarantine.follow())
    await asyncio.sleep(0)
    for digest in ("a", "b"):
        await (other if listed else quarantine).add(digest)
        for _ in range(3):
            await asyncio.sleep(0)
        clock.advance(300.0)
    with pytest.raises(Quarantined):
        await quarantine.check(lambda: "b")
    clock.advance(300.0)
    await quarantine.check(no_digest)
    following.cancel()


async def test_no_digest_is_made_for_a_store_that_does_not_answer() -> None:
    shared = Shared()
    quarantine = Quarantine(ManualClock(), 600.0, shared)
    shared.healthy = False
    await quarantine.check(no_digest)


async def test_what_is_remembered_is_bounded() -> None:
    quarantine = Quarantine(ManualClock(), 600.0)
    for number in range(REMEMBERED + 1):
        await quarantine.add(str(number))
    await quarantine.check(lambda: "0")
    with pytest.raises(Quarantined):
        await quarantine.check(lambda: "1")
