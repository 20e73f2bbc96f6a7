"""What of Ray Serve 2.60.0 the direct data plane rests on: private names, and what its HAProxy does with answers."""

import inspect
from pathlib import Path

import ray.serve
from ray import serve
from ray.llm._internal.serve.core.ingress.router import LLMRouter
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve._private import constants, haproxy, http_util, replica
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.deployment import Application

from cluster.config.schema import CaesuraConfig
from cluster.direct.environment import direct_environment
from cluster.direct.note import NOTE
from cluster.proxy.middleware import ROUTE
from replicas.server import ProgramServer

SCRIPT = (Path(ray.serve.__file__).parent / "_private" / "ingress_request_router.lua.tmpl").read_text()


def test_an_application_takes_a_router_for_haproxy() -> None:
    assert list(inspect.signature(Application._with_ingress_request_router).parameters) == [
        "self",
        "ingress_request_router",
    ]


def test_the_replica_builds_its_own_app() -> None:
    assert replica.SERVE_BUILD_ASGI_APP_METHOD == "__serve_build_asgi_app__"
    assert hasattr(LLMServer, "__serve_build_asgi_app__")
    assert issubclass(serve.ingress()(ProgramServer), http_util.ASGIAppReplicaWrapper)


def test_the_router_s_pick_is_read_as_ray_s_own_reads_it() -> None:
    source = inspect.getsource(LLMRouter._pick_replica)
    for name in ('"_reserve": False', "selection._replica", "replica.backend_http_endpoint", "to_full_id_str()"):
        assert name in source
    assert isinstance(RunningReplica.backend_http_endpoint, property)


def test_haproxy_asks_where_we_answer_and_passes_on_what_we_read() -> None:
    assert f'"POST {ROUTE} HTTP/1.0' in SCRIPT
    assert 'REQUEST_ID_HEADER = "x-request-id"' in SCRIPT
    assert constants.SERVE_SESSION_ID == "x-session-id"


def test_haproxy_takes_a_replica_and_a_flat_map_of_headers() -> None:
    assert """json_body:match('"replica_id"%s*:%s*"([^"]+)"')""" in SCRIPT
    assert """json_body:match('"request_headers"%s*:%s*{(.-)}')""" in SCRIPT
    assert """headers:gmatch('"%s*([^"]-)%s*"%s*:%s*"([^"]*)"')""" in SCRIPT


def test_haproxy_removes_what_clients_send_under_the_router_s_names() -> None:
    assert NOTE.startswith(constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX)
    assert "del-header {{ ingress_request_router_header_prefix }} -m beg" in HAPROXY_CONFIG_TEMPLATE


def test_the_environment_has_names_that_ray_reads() -> None:
    read = inspect.getsource(constants) + inspect.getsource(haproxy)
    unknown = [name for name in direct_environment(CaesuraConfig(), "/run/x") if f'"{name}"' not in read]
    assert unknown == []
