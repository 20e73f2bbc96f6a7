"""More batches than have their lines in memory: none keeps the others out, and no line is lost or run twice."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from openai import AsyncOpenAI

from cluster.batches.input_lines import LineRequest
from cluster.batches.records import Batch
from cluster.batches.results import LineAnswer
from tests.batches.batch_site import Ingress, Replicas, begin, ended, ids, lines, names, until
from tests.waiting import until as sync_until

MakeIngress = Callable[..., Ingress]
FIRST_WINDOW = 4


@dataclass
class HoldOneTenant(Replicas):
    """Only the lines of one tenant wait for the gate."""

    held: str = "large"

    async def answer(self, batch: Batch, number: int, request: LineRequest) -> LineAnswer:
        self.free = int(batch.tenant != self.held)
        return await super().answer(batch, number, request)


@pytest.mark.parametrize("batches", ["a", "ab"])
async def test_a_tenant_whose_lines_take_long_keeps_no_other_tenant_out(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch, batches: str
) -> None:
    monkeypatch.setattr("cluster.batches.runner.MAX_LOADED", len(batches))
    site = ingress(HoldOneTenant())
    large, small = site.client("large"), site.client("small")
    refused = {f"{batches[-1]}{number}" for number in range(FIRST_WINDOW)}
    site.replicas.statuses |= {name: [503] for name in refused}
    begun = [await begin(large, lines(*(f"{batch}{number}" for number in range(20)))) for batch in batches]
    in_flight = FIRST_WINDOW * len(batches)
    await until(large, begun[0].id, lambda _: site.batches.in_flight == in_flight)
    done = await ended(small, (await begin(small, lines("s0", "s1"))).id)
    assert done.request_counts.completed == 2
    assert site.batches.in_flight == in_flight
    site.replicas.gate.set()
    for batch, one in zip(batches, begun, strict=True):
        done = await ended(large, one.id)
        assert await ids(large, done.output_file_id) == [f"{batch}{number}" for number in range(20)]
    assert {name for name, calls in site.replicas.calls.items() if calls == 2} == refused
    assert set(site.replicas.calls.values()) == {1, 2}


async def test_a_tenant_whose_lines_take_all_places_keeps_no_other_tenant_out(ingress: MakeIngress) -> None:
    site = ingress(HoldOneTenant(), max_concurrent=3)
    large, small = site.client("large"), site.client("small")
    begun = await begin(large, lines(*(f"a{number}" for number in range(9))))
    await until(large, begun.id, lambda _: site.batches.in_flight == 3)
    done = await ended(small, (await begin(small, lines("s0", "s1", "s2"))).id)
    assert (done.request_counts.completed, site.batches.in_flight) == (3, 3)
    site.replicas.gate.set()
    assert (await ended(large, begun.id)).request_counts.completed == 9


async def begin_refused(site: Ingress) -> list[str]:
    """Begin two batches whose lines are refused, and return their ids when both have been."""
    batches = []
    for name in ("full-1", "full-2"):
        site.replicas.statuses[name] = [503] * 10_000
        batches.append((await begin(site.client(), lines(name))).id)
        await sync_until(lambda name=name: site.replicas.calls[name])  # type: ignore[misc]
    return batches


async def cancel(client: AsyncOpenAI, batches: list[str]) -> None:
    """End batches, so that no later ingress takes them over."""
    for one in batches:
        await client.batches.cancel(one)
        await ended(client, one)


async def test_batches_whose_model_has_no_room_delay_no_other_model(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.batches.runner.MAX_LOADED", 2)
    site = ingress()
    client = site.client()
    site.replicas.retry_after_s = 3600.0
    refused = await begin_refused(site)
    done = await ended(client, (await begin(client, lines(*names(12)))).id)
    assert done.request_counts.completed == 12
    assert (site.replicas.calls["full-1"], site.replicas.calls["full-2"]) == (1, 1)
    await cancel(client, refused)


async def test_batches_that_are_refused_in_turn_are_not_read_each_time(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.batches.runner.MAX_LOADED", 1)
    site = ingress()
    client = site.client()
    pieces, reads = site.files.pieces, []

    async def counted(file_id: str) -> AsyncIterator[bytes]:
        reads.append(file_id)
        async for piece in pieces(file_id):
            yield piece

    monkeypatch.setattr(site.files, "pieces", counted)
    refused = await begin_refused(site)
    await sync_until(lambda: site.replicas.calls["full-2"] >= 5)
    assert len(set(reads)) == 2 and len(reads) == 4, "each is read once to be checked, and once for its lines"
    await cancel(client, refused)
