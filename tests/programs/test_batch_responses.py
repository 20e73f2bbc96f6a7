"""Responses that are lines of batches, for which only a response that has not failed is an answer."""

import asyncio
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from cluster.api.openai import BATCH_LINE
from cluster.core.errors import BadRequest, Overloaded
from tests.programs import test_http_chat
from tests.programs.response_site import known, openai, registered, site
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.programs.test_http_responses import ADD, waits
from tests.programs.test_runner import spec
from tests.waiting import until


def of_batch(app: Starlette) -> Any:
    """The routes for the lines of batches."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, BATCH_LINE: True}, receive, send)

    return called


async def test_a_response_that_failed_is_no_answer(runners: Runners) -> None:
    def failing() -> Starlette:
        turns = [says("", ("add", "{}")), [BadRequest("too long", code="context_length_exceeded")]]
        runner = runners(ScriptedReplicas(turns), ScriptedTools({"add": lambda call: "2"}))
        return site(runner, known(registered("add")))

    made = await openai(failing()).responses.create(model="m", input="Hi", tools=[ADD])
    assert (made.status, len(made.output)) == ("failed", 1), "a client sees how far it came"
    with pytest.raises(BadRequestError, match="too long"):
        await openai(of_batch(failing())).responses.create(model="m", input="Hi", tools=[ADD])


async def test_a_response_that_was_cancelled_is_no_answer(runners: Runners) -> None:
    replicas = ScriptedReplicas([waits("Hello")])
    runner = runners(replicas)
    asking = asyncio.create_task(openai(of_batch(site(runner))).responses.create(model="m", input="Hi"))
    await until(lambda: replicas.asked)
    [run] = [head for head in await runner.runs("default") if head.open]
    await runner.cancel(run.id)
    with pytest.raises(InternalServerError, match="cancelled"):
        await asking


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_a_program_that_is_refused_and_put_back_is_no_failed_program(
    runners: Runners, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas, seen = ScriptedReplicas([waits("Hello")]), list[str]()
    runner = runners(replicas, max_open=1)
    await runner.start(spec(f"only-{api}"))
    await until(lambda: replicas.asked)
    monkeypatch.setattr(runner._turns, "rejected", lambda code, model: seen.append("rejected"))
    monkeypatch.setattr(runner._turns, "program_ended", lambda key, outcome=None: seen.append("ended"))
    app = site(runner) if api == "responses" else test_http_chat.site(runner)

    async def ask(app: Any) -> None:
        client = openai(app)
        with pytest.raises((InternalServerError, Overloaded), match="in flight"):
            if api == "responses":
                await client.responses.create(model="m", input="Hi")
            else:
                await client.chat.completions.create(**test_http_chat.BODY)

    await ask(app)
    assert seen == ["rejected", "ended"], "a client has no answer"
    await ask(of_batch(app))
    assert seen[2:] == ["rejected"], "the line is tried again"
