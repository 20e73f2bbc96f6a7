"""The price of each place of a context, by which replicas and the router decide."""

from math import inf

import pytest

from cluster.core.kv_price import KvRates, Place, held_for_s, memory_s

RATES = KvRates(compute_s=1e-4, link_s=1e-5, read_s=2e-5)
"""1,000 tokens: 100 ms to compute, 10 ms over the link, 20 ms from the volume."""


def test_the_price_of_each_place() -> None:
    prices = {place: RATES.price(place, 1000) for place in Place if place is not Place.DEVICE}
    assert {place: price.seconds for place, price in prices.items()} == pytest.approx(
        {Place.HOST: 0.01, Place.DISK: 0.03, Place.COMPUTE: 0.1}
    )
    assert [place for place, price in prices.items() if price.gpu_s] == [Place.COMPUTE], "transfers let the GPU compute"
    with pytest.raises(ValueError, match="depends on its time"):
        RATES.price(Place.DEVICE, 1000)


def test_a_hold_costs_its_share_of_the_memory_until_it_costs_as_much_as_another_place() -> None:
    """A tenth of a memory that is in full demand, for 2 s: 0.2 s of the GPU."""
    assert memory_s(1000, 2.0, 10_000, 1.0).seconds == pytest.approx(0.2)
    assert memory_s(1000, 2.0, 10_000, 0.5).seconds == pytest.approx(0.1)
    computed = RATES.price(Place.COMPUTE, 1000)
    held_s = held_for_s(computed, 1000, 10_000, 0.5)
    assert memory_s(1000, held_s, 10_000, 0.5).seconds == pytest.approx(computed.seconds)


def test_the_cheapest_place() -> None:
    both = (Place.HOST, Place.DISK)
    assert RATES.cheapest(both, 1000)[0] is Place.HOST
    assert RATES.cheapest((Place.DISK,), 1000)[0] is Place.DISK
    assert RATES.cheapest((), 1000)[0] is Place.COMPUTE
    slow = KvRates(compute_s=1e-4, link_s=1e-5, read_s=1e-3)
    assert slow.cheapest((Place.DISK,), 1000)[0] is Place.COMPUTE, "a volume that is slower than computing"
    assert KvRates(1e-4).cheapest(both, 1000)[0] is Place.COMPUTE, "there are no tiers"
    assert slow.saved_s(Place.DISK, Place.COMPUTE) == 0.0
    assert RATES.saved_s(Place.HOST, Place.DISK) == pytest.approx(2e-5)


def test_no_tokens_cost_nothing_wherever_they_are() -> None:
    assert KvRates(1e-4, inf, inf).price(Place.DISK, 0).seconds == 0.0
