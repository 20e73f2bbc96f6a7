"""A double of the cluster, served over real HTTP: it speaks the streamed completions protocol and the admin routes."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Misbehaviour:
    """What the double does wrong, and from which turn of a program on."""

    kind: str = "none"
    turn: int = 0


@dataclass
class ClusterDouble:
    """Records what it is asked. `delay_s` precedes the first token, `queue_s` is what stories tell (None: 404)."""

    misbehaviour: Misbehaviour = field(default_factory=Misbehaviour)
    delay_s: float = 0.0
    queue_s: float | None = 0.25
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    admin: list[str] = field(default_factory=list)
    own_policy: dict[str, object] = field(default_factory=lambda: {"name": "caesura", "pause": "infercept"})
    seen: dict[str, int] = field(default_factory=dict)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    busy_resets: int = 0
    """Number of resets that are refused first, because a turn runs."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_put("/admin/policy", self.policy)
        app.router.add_get("/admin/policy", self.policies)
        app.router.add_post("/admin/reset", self.reset)
        app.router.add_get("/v1/programs/{program}", self.story)
        app.router.add_get("/admin/statistics", self.statistics)
        app.router.add_get("/version", self.version)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "double"}]})

    async def policies(self, _: web.Request) -> web.Response:
        return web.json_response({"replicas": [{"replica": name, **self.own_policy} for name in "ab"]})

    async def policy(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = asked["name"]
        if "replica" in asked:
            return web.json_response({"error": {"message": "replica: Extra inputs are not permitted"}}, status=400)
        if name == "unknown":
            return web.json_response({"error": {"message": "unknown policy 'unknown'"}}, status=400)
        if asked == self.own_policy:
            name = "as configured"
        self.admin.append(f"policy {name}")
        return web.json_response({"name": name})

    async def reset(self, _: web.Request) -> web.Response:
        if self.busy_resets:
            self.busy_resets -= 1
            return web.json_response(
                {"replicas": [{"reset": False, "reason": "turns that use the cache: 1"}]}, status=409
            )
        self.admin.append("reset")
        return web.json_response({})

    async def statistics(self, _: web.Request) -> web.Response:
        blocks = {"block_size": 16, "total_blocks": 100, "free_blocks": 60, "cached_blocks": 25, "held_blocks": 30}
        return web.json_response({"replicas": [{**blocks, "host_used_tokens": 7}] * 2})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"caesura": "9.9"})

    async def story(self, request: web.Request) -> web.Response:
        program = request.match_info["program"]
        if self.queue_s is None or request.headers["x-session-id"] != program:
            return web.Response(status=404)
        return web.json_response({"turns": [{"queue_s": self.queue_s}] * self.seen.get(program, 0)})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        program = request.headers["x-session-id"]
        turn = self.seen.get(program, 0)
        self.seen[program] = turn + 1
        self.bodies.append(body)
        self.asked.set()
        self.headers.append(dict(request.headers))
        wrong = self.misbehaviour.kind if turn >= self.misbehaviour.turn else "none"
        if wrong == "503":
            return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "1"})
        if wrong == "400":
            return web.json_response({"error": {"message": "no"}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.delay_s if wrong != "stall" else 60)
        await self.stream(response, body, turn, wrong)
        return response

    async def stream(self, response: web.StreamResponse, body: dict[str, Any], turn: int, wrong: str) -> None:
        async def event(value: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        count = body["max_tokens"] - (wrong == "one_short")
        ids = [(len(body["prompt"]) + i) % 200 + 40 for i in range(count)]
        for i, token in enumerate(ids):
            if i == count // 2 and wrong == "error_event":
                await event({"error": {"message": "the replica died"}})
                return
            if i == count // 2 and wrong == "cut":
                await response.write_eof()
                return
            if i == count // 2 and wrong == "garbage":
                await response.write(b"data: {nonsense\n\n")
                return
            first = {"prompt_token_ids": body["prompt"]} if i == 0 else {}
            shown = {} if wrong == "no_ids" else {"token_ids": [token]}
            await event({"choices": [{"index": 0, "text": "x", **shown, **first}]})
        cached = max(0, len(body["prompt"]) - 16) if turn else 0
        prompt_tokens = len(body["prompt"]) - (wrong == "other_prompt")
        details = None if wrong == "no_details" else {"cached_tokens": cached}
        await event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}})
        await response.write(b"data: [DONE]\n\n")


@pytest.fixture
async def cluster_double() -> AsyncIterator[ClusterDouble]:
    double = ClusterDouble()
    server = TestServer(double.app())
    await server.start_server()
    double.url = str(server.make_url("")).rstrip("/")
    yield double
    await server.close()
