"""Programs in the foreground whose requests an ingress ends when it is stopped: another runner continues them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp
from websockets.asyncio.client import connect

from cluster.http.response_sockets import ResponseSockets
from cluster.http.server import HttpServer
from cluster.local.ports import free_ports
from cluster.proxy.graceful_shutdown import GracefulShutdown
from cluster.proxy.middleware import CancelOnDisconnect
from cluster.runs.runner import ProgramRunner
from tests.programs import message_site, response_site, test_http_chat
from tests.programs.response_site import known, registered
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, says
from tests.programs.test_response_sockets import KEY, MESSAGE_BYTES, guarded
from tests.programs.test_runner import ended, outcome
from tests.waiting import WITHIN_S, until

HOST = "127.0.0.1"
GO: Any = [{"role": "user", "content": "Go."}]
FUNCTION: Any = {"type": "function", "function": {"name": "add"}, "server_side": True}


def messages(runner: ProgramRunner) -> ASGIApp:
    return message_site.site(runner, known(registered("add")))


@dataclass(frozen=True)
class Route:
    """A route that runs programs, and a request for one."""

    path: str
    site: Callable[[ProgramRunner], ASGIApp]
    body: dict[str, Any]


ROUTES = (
    Route("/v1/responses", response_site.site, {"model": "m", "input": "Go."}),
    Route("/v1/chat/completions", test_http_chat.site, {"model": "m", "messages": GO, "tools": [FUNCTION]}),
    Route(
        "/v1/messages",
        messages,
        {
            "model": message_site.MODEL,
            "max_tokens": 9,
            "messages": GO,
            "tools": [{"name": "add", "server_side": True}],
        },
    ),
)


class Ingress:
    """A runner whose turn does not end, behind an ingress's own server."""

    def __init__(self, runners: Runners, site: Callable[[ProgramRunner], ASGIApp]) -> None:
        self.replicas = ScriptedReplicas([[*says("A half")[:2], asyncio.Event()]])
        self.runner = runners(self.replicas)
        self.requests = GracefulShutdown(site(self.runner), self.runner.leave_abandoned)
        port = free_ports(1, HOST)[0]
        self.address = f"{HOST}:{port}"
        app = ResponseSockets(CancelOnDisconnect(self.requests), [], 8, MESSAGE_BYTES)
        self.server = HttpServer(app, HOST, port, MESSAGE_BYTES)

    async def run_id(self) -> str:
        """The id of the run, when the turn has begun."""
        await until(lambda: self.replicas.asked)
        heads = await self.runner.runs("default")
        return heads[0].id


@pytest.fixture
async def ingress(runners: Runners) -> AsyncIterator[Any]:
    made: list[Ingress] = []

    def make(site: Callable[[ProgramRunner], ASGIApp]) -> Ingress:
        made.append(Ingress(runners, site))
        return made[-1]

    yield make
    for one in made:
        await one.server.aclose()


async def continued(runners: Runners, stopped: Ingress, run_id: str) -> None:
    """Close the ingress's runner, and check that another one completes the run."""
    await stopped.server.aclose()  # all requests have ended here
    await asyncio.sleep(0.05)  # enough for a cancellation
    await stopped.runner.aclose()
    assert not stopped.runner.counters["cancelled"]
    other = runners(ScriptedReplicas([says("whole", first_id=200)]))
    other.attend()
    assert outcome(await ended(other, run_id)).status == "completed"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_a_program_whose_request_is_ended_by_the_stop_continues(
    runners: Runners, ingress: Any, route: Route, stream: bool
) -> None:
    there, begun = ingress(route.site), asyncio.Event()

    async def ask() -> tuple[int, bytes]:
        body = route.body | {"stream": stream}
        async with (
            httpx.AsyncClient(base_url=f"http://{there.address}", timeout=WITHIN_S) as client,
            client.stream("POST", route.path, json=body) as answer,
        ):
            begun.set()
            return answer.status_code, await answer.aread()

    asked = asyncio.create_task(ask())
    run_id = await there.run_id()
    if stream:
        await begun.wait()
    assert await there.requests.shut_down(0.1) == 1
    status, text = await asked
    assert status == (200 if stream else 503)
    assert b"the server shuts down" in text
    await continued(runners, there, run_id)


async def test_a_program_of_a_websocket_continues(runners: Runners, ingress: Any) -> None:
    there = ingress(lambda runner: guarded(response_site.site(runner)))
    create = {"type": "response.create", "model": "m", "input": "Go."}
    named = {"Authorization": f"Bearer {KEY}"}
    async with connect(f"ws://{there.address}/v1/responses", additional_headers=named) as client:
        await client.send(json.dumps(create))
        run_id = await there.run_id()
        assert await there.requests.shut_down(0.1) == 1
        async with asyncio.timeout(WITHIN_S):
            while (event := json.loads(await client.recv()))["type"] != "error":
                pass
    assert event["code"] == "shutting_down"
    await continued(runners, there, run_id)


async def test_a_program_whose_client_leaves_before_its_request_is_ended_is_cancelled(ingress: Any) -> None:
    there = ingress(response_site.site)
    async with httpx.AsyncClient(base_url=f"http://{there.address}", timeout=WITHIN_S) as client:
        asked = asyncio.create_task(client.post("/v1/responses", json=ROUTES[0].body))
        await there.run_id()
        stopping = asyncio.create_task(there.requests.shut_down(WITHIN_S))
        asked.cancel()
        await asyncio.wait({asked})
        assert await stopping == 0
    await until(lambda: there.runner.counters["cancelled"] == 1)
