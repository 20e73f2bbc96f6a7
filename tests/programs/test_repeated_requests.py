"""The same bytes with the same Idempotency-Key, although another model would be chosen now and an image is gone."""

from collections.abc import Mapping
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import BadRequest
from cluster.core.lineage import LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.http.chat import ChatPrograms
from cluster.http.conversations import Conversations
from cluster.http.requests import TurnReader
from cluster.http.responses import ResponseRoutes
from cluster.http.stored_responses import StoredResponses
from cluster.runs.runner import ProgramRunner
from cluster.store.conversations import ConversationStore
from tests.programs.response_site import NOWHERE, Visitor, known, registered
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, says

CONFIG = CaesuraConfig.model_validate({"model": {"id": "a"}, "models": {"b": {"source": "tiny"}}})
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
URL = "https://a.example/x"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "auto:any",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}],
        "tools": [{"type": "function", "function": {"name": "add"}, "server_side": True}],
    },
    RESPONSES: {
        "model": "auto:any",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}],
    },
}


class Alternating:
    """Chooses another model each time."""

    def __init__(self) -> None:
        self._models = cycle(("a", "b"))

    def check(self, model: str | None) -> None:
        pass

    async def model_of(self, body: Mapping[str, Any], identity: ProgramIdentity | None) -> str:
        return next(self._models)


class Images:
    """A server of images that has each one once."""

    def __init__(self) -> None:
        self.fetched = 0

    async def read(self, body: dict[str, Any], tenant: str) -> None:
        self.fetched += 1
        if self.fetched > 1:
            raise BadRequest("the image is gone", code="invalid_image")
        [message] = body.get("messages") or body["input"]
        message["content"][0]["image_url"] = "data:image/png;base64,"


def site(runner: ProgramRunner, reader: TurnReader) -> Starlette:
    """As the ingress has it."""
    offers = known(registered("add"))
    chat = ChatPrograms(runner, offers, CONFIG, as_http_error, LineageIndex())
    store = ConversationStore(NOWHERE, timeout_s=2.0, retention_s=60.0, tenant_bytes=1 << 20, clock=MonotonicClock())
    conversations = Conversations(store, StoredResponses(runner), lambda: runner.memory.is_full_for_storing)

    async def plain(method: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        raise AssertionError

    responses = ResponseRoutes(runner, offers, CONFIG, as_http_error, conversations, plain, LineageIndex())

    async def create(request: Request) -> Response:
        body, identity = await reader.sent(request)
        routes = chat if request.url.path == CHAT else responses
        return await routes.create(request, body, identity, partial(reader.prepared, request, body, identity))

    return Starlette(routes=[Route(path, create, methods=["POST"]) for path in BODIES])


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_comes_again_is_the_same_whatever_the_ingress_makes_of_it(
    runners: Runners, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, images = TurnReader(CONFIG, Alternating()), Images()
    monkeypatch.setattr(reader, "_seeing", frozenset({"a", "b"}))
    monkeypatch.setattr(reader._images, "read", images.read)
    replicas = ScriptedReplicas([says("a bird")])
    app = site(runners(replicas), reader)
    answers = []
    for _ in range(2):
        visitor = Visitor(app, BODIES[path], path, idempotency_key=path)
        await visitor.answered
        answers.append(visitor.text)
    assert "a bird" in answers[0]
    assert answers[0] == answers[1]
    assert (len(replicas.asked), images.fetched) == (1, 1)
    await reader.aclose()
