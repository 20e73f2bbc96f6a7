"""A turn that a stop string ends has ended for the scheduler, too: its program pauses, with its context."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from cluster.core.lifecycle.machine import Phase
from replicas.stop_strings import MARK, mark_stopped, sorted_ids, stop
from tests.replica.test_timelines import SYNC_AND_ASYNC, Programs, Replica


class Client:
    """vLLM's AsyncLLM as far as it is used."""

    def __init__(self, **of_engine: Any) -> None:
        self.sent: list[list[str]] = []
        self.processed = SimpleNamespace(reqs_to_abort=["a-1", "b-2"])
        self.output_processor = SimpleNamespace(
            process_outputs=lambda *_: self.processed, external_req_ids={"a": ["a-1", "a-2"]}
        )
        self.engine_core = SimpleNamespace(abort_requests_async=self.send, **of_engine)

    async def send(self, ids: list[str]) -> None:
        self.sent.append(ids)


def test_the_ids_that_a_stop_string_ended_are_marked() -> None:
    client = Client()
    mark_stopped(client)
    ids = client.output_processor.process_outputs([], 0.0, None).reqs_to_abort
    assert sorted_ids([*ids, "c-3"], ()) == (["a-1", "b-2"], ["c-3"])
    assert sorted_ids(ids, [MARK + "b-2"]) == (["a-1"], [MARK + "b-2"])


async def test_a_stop_string_that_we_find_ends_all_parts_of_the_request() -> None:
    client = Client()
    await stop(client, "a")
    await stop(client, "gone")
    assert client.sent == [[f"{MARK}a-1", f"{MARK}a-2"], []]


async def test_nothing_is_marked_where_vllm_finds_the_engine_by_the_id() -> None:
    client = Client(reqs_in_flight={})
    mark_stopped(client)
    assert client.output_processor.process_outputs([], 0.0, None).reqs_to_abort == ["a-1", "b-2"]
    await stop(client, "a")
    assert client.sent == []


@SYNC_AND_ASYNC
def test_a_running_turn_pauses_and_a_waiting_one_is_aborted(replica: Replica, asynchronous: bool) -> None:
    p = Programs(replica("continuum", asynchronous))
    running = p.arrive("a", 320, output=50)
    for _ in range(4):
        p.step()
    waiting = p.arrive("b", 900, output=50)
    p.step()
    assert p.scheduler.requests[running].status == RequestStatus.RUNNING
    assert p.scheduler.requests[waiting].status == RequestStatus.WAITING
    p.scheduler.finish_requests([MARK + running, MARK + waiting, MARK + "unknown"], RequestStatus.FINISHED_ABORTED)
    assert [p.phase(name) for name in "ab"] == [Phase.HELD, Phase.RELEASED]
    p.scheduler.check_integrity()
    later = p.arrive("a", 20)
    prompt_tokens = p.scheduler.requests[later].num_prompt_tokens
    assert p.step() == {later: prompt_tokens - 320}
    p.engine.run()
    p.scheduler.check_integrity()


def test_a_turn_that_vllm_ends_because_it_repeats_itself_pauses(replica: Replica) -> None:
    p = Programs(replica("continuum"))
    running = p.arrive("a", 320, output=50)
    p.step()
    p.scheduler.finish_requests(running, RequestStatus.FINISHED_REPETITION)
    assert p.phase("a") is Phase.HELD
