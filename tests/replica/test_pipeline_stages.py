"""Pipeline stages: one step for each stage is in flight, and a synchronous engine waits for the tokens of a turn."""

from collections.abc import Callable

import pytest

from replicas.virtual_engine import VirtualEngine


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_step_in_flight_is_not_scheduled_again_before_its_tokens_are_known(
    replica: Callable[..., VirtualEngine], asynchronous: bool
) -> None:
    engine = replica()
    scheduler = engine.scheduler
    scheduler.use_pp = True
    scheduler.scheduler_config.async_scheduling = asynchronous
    request = engine.submit("a", list(range(40)), 3)

    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {request.request_id: 40}
    second = scheduler.schedule()
    # A synchronous first stage gets a decode's token ids from the scheduler, and there is none yet.
    assert second.num_scheduled_tokens == ({request.request_id: 1} if asynchronous else {})
    engine.complete(first)
    engine.complete(second)

    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {request.request_id: 1}
    sent = third.scheduled_cached_reqs.new_token_ids
    assert sent == ([] if asynchronous else [[request.output_token_ids[0]]])
    engine.complete(third)
    assert request.num_output_placeholders == 0
