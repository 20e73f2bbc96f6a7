"""What a stranger can reach: no route of the engine, no port but the one, no address of ours through a tool."""

import json
import pickletools
from typing import Any

import grpc
import httpx
import psutil
import pytest
import redis

from cluster.auth.middleware import OPEN_PATHS
from tests.faults.outsiders.guarded import Guarded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ENGINE_ROUTES = """sleep wake_up is_sleeping collective_rpc reset_prefix_cache reset_mm_cache
    reset_encoder_cache server_info load pause resume is_paused scale_elastic_ep
    is_scaling_elastic_ep start_profile stop_profile update_weights init_weight_transfer_engine
    get_world_size abort_requests v1/load_lora_adapter v1/unload_lora_adapter
    invocations ping pooling classify score rerank v1/embeddings v1/audio/transcriptions
    render tokenizer_info internal/route internal/warmup llm_config debug api/jobs
    api/serve/applications""".split()  # noqa: SIM905
"""Of vLLM's server, Ray Serve LLM's and Ray's dashboard."""
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE")


def test_no_route_of_the_engine_is_there(guarded: Guarded, promised: Any) -> None:
    with guarded.client("ops") as most, guarded.client("acme") as acme, guarded.client(None) as nobody:
        told = {
            (method, path): most.request(method, f"/{path}").status_code for path in ENGINE_ROUTES for method in METHODS
        }
        reached = {key: status for key, status in told.items() if status not in (404, 405)}
        described = most.get("/openapi.json").json()["paths"]
        ours = [(path.replace("{", "").replace("}", ""), method) for path in described for method in described[path]]
        without = [
            (path, method)
            for path, method in ours
            if path not in OPEN_PATHS and nobody.request(method.upper(), path).status_code != 401
        ]
        administration = [(path, method) for path, method in ours if path.startswith("/admin") or path == "/metrics"]
        as_tenant = [
            (path, method) for path, method in administration if acme.request(method.upper(), path).status_code != 403
        ]
        assert len(ours) > 25 and len(administration) > 6
    assert not reached and not without and not as_tenant, (reached, without, as_tenant)
    fault = "a stranger asks for control routes"
    promised(fault, f"engine routes reached, of {len(told)}", len(reached), exactly=0)
    promised(fault, f"routes open without a key, of {len(ours)}", len(without), exactly=0)
    promised(fault, "admin routes open to a tenant", len(as_tenant), exactly=0)


RAY_CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVGet",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequestWithRejection",
)
"""One of each of Ray's services; what a worker or a replica is sent, it unpickles."""


def test_rays_ports_know_nobody_without_its_token(guarded: Guarded, promised: Any) -> None:
    """Ray's processes listen on loopback, and Serve's replicas on every interface. All ask for the cluster's token."""
    listening = [
        (process.name(), link.laddr.ip, link.laddr.port)
        for process in guarded.family
        for link in process.net_connections(kind="inet")
        if link.status == psutil.CONN_LISTEN
    ]
    outside = [name for name, ip, _ in listening if ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
    assert all(name.startswith("ray::ServeReplica") for name in outside), outside
    # gRPC servers, which all are Ray's, listen by IPv6 even on loopback.
    ports = {port for _, ip, port in listening if ip.startswith("::")}
    assert len(ports) > 5 and guarded.port not in ports
    codes = {(port, call): _called(port, call) for port in ports for call in RAY_CALLS}
    answered = {key: code for key, code in codes.items() if code is grpc.StatusCode.OK}
    asked = [key for key, code in codes.items() if code is grpc.StatusCode.UNAUTHENTICATED]
    changed = [port for port in ports if _posted(port) not in (None, 401, 405)]
    assert len({call for _, call in asked}) >= len(RAY_CALLS) - 1, "the services were found, and asked who we are"
    assert not answered and not changed, (answered, changed)
    promised("a stranger calls Ray's ports", f"calls served without the token, on {len(ports)} ports", 0, exactly=0)


def _called(port: int, call: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(call)(b"", timeout=5.0)
        except grpc.RpcError as error:
            code = error.code()
            assert isinstance(code, grpc.StatusCode)
            return code
    return grpc.StatusCode.OK


def _posted(port: int) -> int | None:
    try:
        return httpx.post(f"http://127.0.0.1:{port}/get_or_create_runtime_env", timeout=5.0).status_code
    except httpx.TransportError:
        return None


SPELLINGS = (
    "http://127.0.0.1:{port}/",
    "http://2130706433:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://0x7f.1:{port}/",
    "http://127.1:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[64:ff9b::7f00:1]:{port}/",
    "http://localhost:{port}/",
    "http://LOCALHOST.:{port}/",
    "http://0:{port}/",
    "http://\u2460\u2461\u2466.0.0.1:{port}/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/",
    "http://100.100.100.200/",
    "http://127.0.0.1:{redis}/",
    "http://a@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}#@example.com/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:{redis}/_INFO",
)


def test_a_requests_mcp_server_is_no_address_of_ours(guarded: Guarded, promised: Any) -> None:
    """Redirects and names that change between two look-ups: tests/faults/test_ssrf.py."""
    ports = {
        "port": guarded.sink.url.rpartition(":")[2],
        "redis": guarded.redis.url.rpartition(":")[2].partition("/")[0],
    }
    before = set(guarded.sink.received)
    failed: list[Any] = []
    with guarded.client("acme") as client:
        for spelt in SPELLINGS:
            server = {
                "type": "mcp",
                "server_label": "s",
                "server_url": spelt.format(**ports),
                "require_approval": "never",
            }
            body = {"model": "tiny", "input": "Hi", "max_output_tokens": 2, "tools": [server]}
            answer = client.post("/v1/responses", json=body)
            if answer.status_code not in (400, 424) or "error" not in answer.json():
                failed.append((spelt, answer.status_code, answer.text[:200]))
    arrived = [path for path in guarded.sink.received if path != "/v1/traces" and path not in before]
    assert not failed, failed
    fault = "SSRF by a request's MCP server"
    promised(fault, f"addresses of ours not refused, of {len(SPELLINGS)}", len(failed), exactly=0)
    promised(fault, "requests that arrived", len(arrived), exactly=0)


def test_what_redis_has_is_text_that_nobody_unpickles(guarded: Guarded, promised: Any) -> None:
    with guarded.client("acme") as client:
        body = {"model": "tiny", "input": "Hi", "max_output_tokens": 4}
        assert client.post("/v1/responses", json=body).status_code == 200
    store = redis.Redis.from_url(guarded.redis.url)
    pickled, seen = [], 0
    for key in store.scan_iter():
        for value in _values(store, key):
            seen += 1
            if _is_pickle(value):
                pickled.append((key, value[:60]))
    store.close()
    assert seen > 10
    assert not pickled, pickled
    promised("bytes from Redis", f"pickles, of {seen} values", len(pickled), exactly=0)


def _values(store: Any, key: bytes) -> list[bytes]:
    match store.type(key).decode():
        case "string":
            return [store.get(key)]
        case "hash":
            return [part for pair in store.hgetall(key).items() for part in pair]
        case "list":
            return list(store.lrange(key, 0, -1))
        case "set":
            return list(store.smembers(key))
        case "zset":
            return list(store.zrange(key, 0, -1))
        case "stream":
            return [part for _, fields in store.xrange(key) for pair in fields.items() for part in pair]
        case kind:
            raise AssertionError(f"a value of a kind that this test does not read: {kind}")


def _is_pickle(value: bytes) -> bool:
    if value.isdigit() or value[:1] in (b"{", b"["):
        json.loads(value)
        return False
    try:
        for _ in pickletools.genops(value):
            pass
    except ValueError:
        return False
    return True
