"""Chat completions whose tools the cluster runs: the chunks of a log, and the route over a runner with a real log."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, HttpError, UpstreamFailed
from cluster.core.identity import identify
from cluster.core.lineage import LineageIndex
from cluster.http.chat import ChatPrograms
from cluster.http.idempotency import keep_digest
from cluster.runs import task
from cluster.runs.chat_api import ChatFold, deltas
from cluster.runs.events import Generated, RunEvent, TurnIntent, require_encodable
from cluster.runs.runner import ProgramRunner
from tests.programs.response_site import TENANT, Visitor, as_sent, known, registered
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.programs.test_runner import spec
from tests.responses.run_logs import COMPLETED, accepted, call, offer, result, tool_round, turn
from tests.waiting import until

ADD = {"type": "function", "function": {"name": "add"}, "server_side": True}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [ADD]}
PATH = "/v1/chat/completions"


async def chunks(*batches: Sequence[RunEvent]) -> list[dict[str, Any]]:
    async def source() -> AsyncIterator[Sequence[RunEvent]]:
        for batch in batches:
            yield batch

    return [chunk async for chunk in deltas(ChatFold(), source())]


def text_of(chunks: list[dict[str, Any]], kind: str = "content") -> str:
    return "".join(chunk["choices"][0]["delta"].get(kind, "") for chunk in chunks)


def one_by_one(*events: RunEvent) -> list[list[RunEvent]]:
    return [[event] for event in events]


async def test_the_texts_of_the_turns_have_a_line_between_them() -> None:
    one = call("look")
    log = (accepted(offer(here=True)), *turn(1, "Let me see.", one), *tool_round(one), *turn(2, "It is 2."), COMPLETED)
    assert text_of(await chunks(*one_by_one(*log))) == text_of(await chunks(log)) == "Let me see.\n\nIt is 2."


LOST = (TurnIntent(1), Generated(1, "", "I think"), Generated(1, "The answer "), TurnIntent(1, 2))


async def test_what_an_attempt_that_is_lost_has_sent_is_not_sent_again() -> None:
    again = [Generated(1, "", "I "), Generated(1, "", "think so.")]
    again += [Generated(1, "The "), Generated(1, "answer is "), Generated(1, "42.")]
    log = (accepted(), *LOST, *again, result(1, "The answer is 42.", reasoning="I think so."), *turn(2, "Bye."))
    made = await chunks(*one_by_one(*log, COMPLETED))
    assert text_of(made) == "The answer is 42.\n\nBye."
    assert text_of(made, "reasoning") == "I think so."
    twice = (*LOST, Generated(1, "", "I think"), Generated(1, "The ans"), TurnIntent(1, 3), *again)
    log = (accepted(), *twice, result(1, "The answer is 42.", reasoning="I think so."), COMPLETED)
    assert text_of(await chunks(*one_by_one(*log))) == "The answer is 42."


@pytest.mark.parametrize(
    "again",
    [
        (Generated(1, "The answer is 42.", "I guess"), result(1, "The answer is 42.", reasoning="I guess")),
        (Generated(1, "", "I think"), Generated(1, "The number"), result(1, "The number", reasoning="I think")),
        (Generated(1, "", "I think"), Generated(1, "The"), result(1, "The", reasoning="I think")),
        (Generated(1, "The answer "), result(1, "The answer ")),
    ],
    ids=["other reasoning", "another text", "less text", "no reasoning"],
)
async def test_a_stream_whose_turn_is_tried_again_with_another_text_ends_with_an_error(
    again: tuple[RunEvent, ...],
) -> None:
    log = (accepted(), *LOST, *again, COMPLETED)
    with pytest.raises(UpstreamFailed, match="with another text than was sent"):
        await chunks(*one_by_one(*log))
    # Where the attempt is known to be lost before anything of it is sent, nothing is amiss.
    assert text_of(await chunks(log)) == again[-1].content  # type: ignore[union-attr]
    fold = ChatFold()
    for event in log:
        if not isinstance(event, Generated):
            fold.feed(event)
    assert fold.completion()["choices"][0]["message"]["content"] == again[-1].content  # type: ignore[union-attr]


def site(runner: ProgramRunner, offers: Any = None) -> Starlette:
    """As the ingress has it."""
    programs = ChatPrograms(runner, offers or known(registered("add")), CaesuraConfig(), as_http_error, LineageIndex())

    async def create(request: Request) -> Response:
        body = json.loads(await request.body())
        keep_digest(request, body)
        identified = identify(request.headers, body, TENANT)
        return await programs.create(request, identified.body, identified.identity, as_sent(identified.body))

    return Starlette(routes=[Route(PATH, create, methods=["POST"])])


@pytest.mark.parametrize("stays", [False, True], ids=["no key", "a key"])
async def test_a_stream_with_another_text_ends_its_run_unless_it_may_be_repeated(
    runners: Runners, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "RETRY_S", 0.0)
    lost, rest = asyncio.Event(), asyncio.Event()
    other = says("Another text.", first_id=200)
    replicas = ScriptedReplicas(
        [[*says("The answer is")[:2], lost, HttpError("lost", status=502)], [*other[:2], rest, *other[2:]]]
    )
    runner = runners(replicas, ScriptedTools({}))
    headers = {"idempotency_key": "another-text"} if stays else {}
    visitor = Visitor(site(runner), BODY | {"stream": True}, PATH, **headers)
    await until(lambda: "The an" in visitor.text)
    lost.set()
    await visitor.answered
    assert '"type":"upstream_error"' in visitor.text
    assert "Anothe" not in visitor.text
    if stays:
        rest.set()
    await until(lambda: not runner.open_runs)
    assert runner.counters["completed" if stays else "cancelled"] == 1
    if stays:
        again = Visitor(site(runner), BODY | {"stream": True}, PATH, **headers)
        await again.answered
        pieces = [json.loads(line[6:]) for line in again.text.split("\n\n") if line.startswith("data: {")]
        assert text_of(pieces) == "Another text."


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1 << 64},
        {"messages": [{"role": "user", "content": "hi", "number": -(1 << 63) - 1}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": 1 << 70}}}},
    ],
    ids=["sampling", "message", "schema"],
)
async def test_an_integer_that_the_log_cannot_have_is_the_request_s_fault(
    runners: Runners, fields: dict[str, Any]
) -> None:
    runner = runners(ScriptedReplicas([]))
    with pytest.raises(BadRequest, match="more than 64 bits"):
        await Visitor(site(runner), BODY | fields, PATH).answered
    assert not runner.counters["started"]


async def test_a_message_that_is_no_object_is_refused(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([]))
    with pytest.raises(BadRequest) as refused:
        await Visitor(site(runner), BODY | {"messages": ["hi"]}, PATH).answered
    assert refused.value.param == "messages.0"
    assert not runner.counters["started"]


def test_a_run_that_the_log_could_not_be_read_with_is_refused() -> None:
    with pytest.raises(BadRequest, match="messages"):
        require_encodable(spec("unreadable", messages=("hi",)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_repeated_request_has_the_same_completion(runners: Runners, stream: bool) -> None:
    offered = [registered("add")]

    async def offers(tenant: str, definitions: Any) -> Any:
        return tuple(offered)

    replicas = ScriptedReplicas([says("hello")])
    app = site(runners(replicas, ScriptedTools({})), offers)
    answers = []
    for _ in range(3):
        visitor = Visitor(app, BODY | {"stream": stream, "stream_options": {"include_usage": True}}, PATH,
                          idempotency_key=f"same-{stream}")  # fmt: skip
        await visitor.answered
        answers.append(visitor.text)
        if len(answers) == 2:
            offered.clear()  # the tool is not registered any more, but the run is
    assert len(replicas.asked) == 1
    assert ("hello" in answers[0]) is not stream, "a stream has it in two pieces"
    assert answers[1:] == answers[:1] * 2
