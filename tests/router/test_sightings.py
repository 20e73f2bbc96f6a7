"""What an ingress has heard of its replicas: ages and states."""

from front_views import snapshot

from cluster.clock import ManualClock
from router.sightings import ReplicaState, Sightings


def test_the_age_is_that_of_the_newest_news_and_a_replica_that_is_gone_has_none():
    clock = ManualClock()
    sightings = Sightings(clock)
    sightings.observe({"a": snapshot("a", 1), "b": snapshot("b", 1), "c": None})
    clock.advance(3.0)
    sightings.observe({"a": snapshot("a", 1), "b": snapshot("b", 2), "c": None})
    assert sightings.ages_s() == {"a": 3.0, "b": 0.0, "c": None}
    sightings.observe({"b": snapshot("b", 2)})
    assert "a" not in sightings
    assert sightings.ages_s() == {"b": 0.0}


def test_every_state_is_counted_also_where_nobody_is_in_it():
    sightings = Sightings(ManualClock())
    assert sightings.states() == {ReplicaState.UP: 0, ReplicaState.DRAINING: 0, ReplicaState.SILENT: 0}
    sightings.observe({"a": snapshot("a"), "b": snapshot("b", draining=True), "c": None, "d": snapshot("d")})
    assert sightings.states() == {ReplicaState.UP: 2, ReplicaState.DRAINING: 1, ReplicaState.SILENT: 1}
