"""A turn of a program that the cluster runs, through Ray Serve: what a program runner calls."""

from typing import Any

import pytest
from ray import serve

from cluster.app import APPLICATION
from cluster.core.errors import HttpError, ProgramMoved
from cluster.core.program import ProgramIdentity
from cluster.core.replica_snapshot import ROUTING_STATS_KEY, ReplicaSnapshot
from cluster.core.stream import joined
from cluster.core.turn import Continuation, PromptMode, TurnBegan, TurnDelta, TurnDone, pack_ids, unpack_ids

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def home(cluster: Any) -> Any:
    """One of the replicas."""
    deployments = serve.status().applications[APPLICATION].deployments
    [name] = [name for name in deployments if name.startswith("ProgramServer")]
    handle = serve.get_deployment_handle(name, APPLICATION)
    return handle.options(session_id=handle.snapshot.remote().result()["replica"])


def turn(
    home: Any, body: dict[str, Any], continuation: Continuation | None = None, epoch: int | None = None
) -> list[Any]:
    identity = ProgramIdentity(program_id="handle")
    handle = home.options(stream=True)
    headers = {"x-request-id": f"handle-{len(body['messages'])}"}
    batches = handle.turn.remote(body, headers, identity.key, identity.encode(), continuation, epoch)
    return [piece for batch in batches for piece in ([batch] if isinstance(batch, HttpError) else batch.data)]


def test_two_turns_through_the_handle(home: Any) -> None:
    messages = [{"role": "user", "content": "Tell me. " * 40}]
    body = {"messages": messages, "max_completion_tokens": 40, "ignore_eos": True}
    began, *deltas, done = turn(home, body)
    assert isinstance(began, TurnBegan)
    assert isinstance(done, TurnDone)
    assert all(isinstance(delta, TurnDelta) for delta in deltas)
    context = unpack_ids(began.added_ids + b"".join(delta.token_ids for delta in deltas))
    assert len(context) == done.prompt_tokens + done.output_tokens
    first_alone_s = done.alone_s
    answer = {"role": "assistant", "content": "".join(delta.content for delta in deltas)}
    body["messages"] = [*messages, answer, {"role": "user", "content": "More."}]
    began, *_, done = turn(home, body, Continuation(pack_ids(context), 2))
    assert began.rendering is PromptMode.CONTINUED
    assert done.prompt_tokens == len(context) + len(unpack_ids(began.added_ids))
    assert done.cached_tokens >= len(context) - 32
    assert 0 < done.alone_s < first_alone_s, "its bound is that of the new tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["chat", "completions"])
def test_an_answer_says_how_long_its_first_token_takes_alone(home: Any, stream: bool, method: str) -> None:
    text = f"{method} {stream}. " * 20
    prompt = {"messages": [{"role": "user", "content": text}]} if method == "chat" else {"prompt": text}
    body = {"model": "tiny", **prompt, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    identity = ProgramIdentity(program_id=f"alone-{method}-{stream}")
    answers = home.options(stream=True).answer.remote(
        method, body, {"x-request-id": text[:20]}, identity.key, identity.encode()
    )
    chunks = list(answers)
    assert not [chunk.message for chunk in chunks if isinstance(chunk, HttpError)]
    progress = joined([chunk.progress for chunk in chunks])
    assert progress.alone_s is not None
    assert progress.alone_s > 0
    assert b"alone" not in b"".join(chunk.data for chunk in chunks)


def test_a_refusal_arrives(home: Any) -> None:
    [refusal] = turn(home, {"messages": [], "temperature": "hot"})
    assert isinstance(refusal, HttpError)
    assert (refusal.status, refusal.param) == (400, "temperature")


def test_the_snapshot_tells_whether_prompts_are_extended(home: Any) -> None:
    assert home.snapshot.remote().result()["template_prefix_stable"] is True


def test_a_turn_for_a_home_that_its_program_has_left_is_refused_and_nothing_is_done(home: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Go on. " * 60}], "max_completion_tokens": 2, "ignore_eos": True}
    assert isinstance(turn(home, body, epoch=1)[-1], TurnDone)
    assert home.moved_away.remote("default/handle", 2).result()["moved"] is True
    [refusal] = turn(home, body, epoch=1)
    assert isinstance(refusal, ProgramMoved)
    answers = home.options(stream=True).answer.remote("chat", body, {}, "default/handle", None, 1)
    assert [type(piece) for piece in answers] == [ProgramMoved]
    assert isinstance(turn(home, body, epoch=3)[-1], TurnDone)


def test_a_replica_drains_and_stops_draining(home: Any) -> None:
    assert home.drain.remote(True).result()["draining"] is True
    assert home.snapshot.remote().result()["draining"] is True
    stats = ReplicaSnapshot.decode(home.record_routing_stats.remote().result()[ROUTING_STATS_KEY])
    assert (stats.replica, stats.draining) == (home.snapshot.remote().result()["replica"], True)
    assert stats.prefixes and stats.kv_tokens > 0
    home.drain.remote(False).result()
    assert home.snapshot.remote().result()["draining"] is False
