"""The stand itself: what it is made of can be found, and one that is wounded is whole again."""

import pytest

from tests.faults.stand import CONTROLLER, ENGINE, INGRESS, REPLICA, TOOLS, Stand
from tests.faults.under_load import Outcome, background, clients, completion, run, stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_its_parts_are_told_apart(whole: Stand) -> None:
    counts = {title: len(whole.named(title)) for title in (REPLICA, ENGINE, INGRESS, TOOLS, CONTROLLER)}
    assert counts == {REPLICA: 2, ENGINE: 2, INGRESS: 1, TOOLS: 1, CONTROLLER: 1}
    assert whole.redis.pid is not None


async def test_what_it_is_asked_ends(whole: Stand) -> None:
    async with clients(whole.url) as client:
        first, again = [await stream(client, completion("Once", 40)) for _ in range(2)]
        booked = await background(client, run("book", "look"))
    assert (first.outcome, again.text, booked.outcome) == (Outcome.DONE, first.text, Outcome.DONE)
    assert first.text and "booked, number" in booked.text
    whole.check_idle()
