"""The door before all routes: keys, roles, limits. What is behind it here says who came in."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from cluster.api.openai import ErrorBoundary, error_response
from cluster.auth.keys import Caller, Role
from cluster.auth.middleware import AuthMiddleware, caller_of, charge_answers
from cluster.auth.tenants import TenantLimit, TenantLimits
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import HttpError, TooManyRequests

KEYS = {
    "acme-key": Caller("acme", frozenset({Role.SERVE}), "ci"),
    "other-key": Caller("other", frozenset({Role.SERVE})),
    "metrics-key": Caller("ops", frozenset({Role.METRICS})),
    "admin-key": Caller("ops", frozenset({Role.ADMIN})),
}
TURNS = "/v1/chat/completions"


def known(error: BaseException) -> HttpError:
    assert isinstance(error, HttpError)
    return error


async def who(request: Request) -> Response:
    caller = caller_of(request)
    return JSONResponse({"tenant": caller.tenant, "headers": sorted(request.headers)})


async def stream(request: Request) -> Response:
    def pieces() -> Iterator[bytes]:
        yield b"a"
        raise RuntimeError("broke off")

    return StreamingResponse(pieces())


def client(
    clock: ManualClock | None = None,
    on_rejection: Callable[[Headers, str, str], None] = lambda headers, tenant, reason: None,
    *,
    keys: bool = True,
    **limits: Any,
) -> TestClient:
    config = CaesuraConfig.model_validate({"tenants": {"acme": limits}})
    paths = ("/health", "/ready", "/metrics", "/admin", "/admin/policy", "/v1/models", "/docs", "/nothing", TURNS)
    app = Starlette(
        routes=[*(Route(path, who, methods=["GET", "POST"]) for path in paths), Route("/stream", stream)],
        middleware=[
            Middleware(
                ErrorBoundary,
                error_map=known,
                max_header_bytes=10_000,
                max_in_flight=10,
                limited_paths=frozenset({TURNS}),
            ),
            Middleware(
                AuthMiddleware,
                config=config,
                find=KEYS.get if keys else None,
                clock=clock or ManualClock(),
                on_rejection=on_rejection,
                limited_paths=frozenset({TURNS, "/stream"}),
            ),
        ],
    )
    return TestClient(app, raise_server_exceptions=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(path: str) -> None:
    assert client().get(path).status_code == 200


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_of_two_keys_none_opens(header: str) -> None:
    prefix = "Bearer " if header == "authorization" else ""
    twice = [(header, prefix + key) for key in ("acme-key", "other-key")]
    assert client().post(TURNS, headers=twice).status_code == 401
    assert client().post(TURNS, headers=[twice[0], twice[0]]).status_code == 200


@pytest.mark.parametrize("path", [TURNS, "/v1/models", "/metrics", "/admin", "/admin/policy", "/docs", "/no-route"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"Authorization": "Basic acme-key"}], ids=str)
def test_everything_else_is_closed(path: str, headers: dict[str, str]) -> None:
    answer = client().post(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize(
    "headers", [bearer("acme-key"), {"authorization": "bearer  acme-key "}, {"X-Api-Key": "acme-key"}]
)
def test_a_key_is_its_tenant_and_goes_no_further(headers: dict[str, str]) -> None:
    answer = client().get(TURNS, headers=headers).json()
    assert answer["tenant"] == "acme"
    assert not {"authorization", "x-api-key"} & set(answer["headers"])


@pytest.mark.parametrize(
    ("key", "opens"),
    [
        ("acme-key", {TURNS, "/v1/models", "/docs"}),
        ("metrics-key", {"/metrics"}),
        ("admin-key", {TURNS, "/v1/models", "/docs", "/metrics", "/admin", "/admin/policy"}),
    ],
)
def test_roles(key: str, opens: set[str]) -> None:
    every = (TURNS, "/v1/models", "/docs", "/metrics", "/admin", "/admin/policy")
    statuses = {path: client().get(path, headers=bearer(key)).status_code for path in every}
    assert statuses == {path: 200 if path in opens else 403 for path in every}


def test_without_configured_keys_everybody_is_the_default_tenant() -> None:
    everybody = client(keys=False)
    assert everybody.get(TURNS).json()["tenant"] == "default"
    assert everybody.get("/admin/policy", headers=bearer("whatever")).status_code == 200


def test_a_rate_is_kept_and_told() -> None:
    clock = ManualClock()
    refusals: list[tuple[str, str]] = []
    door = client(clock, lambda headers, tenant, code: refusals.append((tenant, code)), requests_per_s=2.0, burst=3)
    answers = [door.get(TURNS, headers=bearer("acme-key")) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[:3]] == ["2", "1", "0"]
    assert answers[2].headers["x-ratelimit-reset-requests"] == "1.500s"
    assert (answers[3].headers["retry-after"], answers[3].headers["retry-after-ms"]) == ("1", "500")
    assert answers[3].json()["error"]["code"] == "tenant_rate"
    assert door.get(TURNS, headers=bearer("other-key")).status_code == 200  # nobody else's matter
    assert door.get("/v1/models", headers=bearer("acme-key")).status_code == 200  # makes no work
    assert refusals == [("acme", "tenant_rate")]
    clock.advance(0.5)
    assert [door.get(TURNS, headers=bearer("acme-key")).status_code for _ in range(2)] == [200, 429]


def test_turns_at_a_time_are_bounded_and_come_free_however_they_end() -> None:
    tenants = TenantLimits({"acme": TenantLimit(max_concurrent=1)}, TenantLimit(), ManualClock())
    tenants.enter("acme")
    with pytest.raises(HttpError, match="1 requests of this tenant are in flight"):
        tenants.enter("acme")
    tenants.enter("other")
    tenants.leave("acme")
    tenants.enter("acme")

    door = client(max_concurrent=1)
    for _ in range(3):  # each broke off in the middle of its stream
        assert door.get("/stream", headers=bearer("acme-key")).status_code == 200


def test_each_answer_of_a_request_counts() -> None:
    clock = ManualClock()
    limits = TenantLimits({"t": TenantLimit(1.0, 4, 8)}, TenantLimit(), clock)
    limits.enter("t")
    limits.add("t", 5)  # 6 answers: two more than the burst, which are paid later
    with pytest.raises(TooManyRequests) as caught:
        limits.enter("t")
    assert caught.value.retry_after_s == 3.0
    with pytest.raises(TooManyRequests, match="would be in flight"):
        limits.add("t", 3)
    limits.leave("t", 6)
    clock.move_to(clock.now_s() + 3.0)
    limits.enter("t")
    limits.add("t", 7)  # everything has been given back
    with pytest.raises(TooManyRequests):
        limits.add("t", 1)


def test_a_request_gives_all_its_answers_back() -> None:
    answers = [3, 1, 4]

    async def several(request: Request) -> Response:
        charge_answers(request, answers.pop(0))
        return JSONResponse({})

    async def refused(_: Request, error: Exception) -> Response:
        return error_response(known(error))

    config = CaesuraConfig.model_validate({"tenants": {"acme": {"max_concurrent": 3}}})
    app = AuthMiddleware(
        Starlette(routes=[Route(TURNS, several, methods=["POST"])], exception_handlers={HttpError: refused}),
        config=config,
        limited_paths=frozenset({TURNS}),
        find=KEYS.get,
    )
    guarded = TestClient(
        ErrorBoundary(app, error_map=known, max_header_bytes=9999, max_in_flight=9, limited_paths=frozenset())
    )
    headers = {"authorization": "Bearer acme-key"}
    assert [guarded.post(TURNS, headers=headers).status_code for _ in range(3)] == [200, 200, 429]


def test_a_refused_request_takes_nothing() -> None:
    clock = ManualClock()
    limits = TenantLimits({}, TenantLimit(requests_per_s=1.0, burst=1, max_concurrent=1), clock)
    limits.enter("a")
    for _ in range(5):
        with pytest.raises(HttpError):
            limits.enter("a")
    limits.leave("a")
    with pytest.raises(HttpError, match="more than this tenant's 1 requests a second"):
        limits.enter("a")
    clock.advance(1.0)
    assert limits.enter("a") is not None
