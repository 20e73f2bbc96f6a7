"""Every private name of Ray Serve LLM 2.60.0 that Caesura uses, and of vLLM behind it, still is what it was."""

import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import vllm.config
from ray import serve
from ray._common.utils import Timer
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackConfig, CallbackCtx
from ray.llm._internal.serve.core.configs import openai_api_models
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.llm._internal.serve.core.server import llm_server
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.llm._internal.serve.engines.vllm import vllm_engine, vllm_models
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve._private import deployment_state, http_util, proxy_state
from ray.serve._private.controller import ServeController
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle, DeploymentResponseGenerator
from ray.serve.llm import LLMConfig
from ray.serve.schema import ApplicationStatus, DeploymentStatus
from transformers import PretrainedConfig
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize import api_router as tokenize_router
from vllm.parser.parser_manager import ParserManager

from cluster.proxy.middleware import IMPORT_PATH, middlewares
from replicas.engine import ReplicaEngine
from replicas.server import ProgramServer


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_pinned() -> None:
    assert ray.__version__ == version("ray") == "2.60.0"


class ScriptedEngine(VLLMEngine):
    """Ray's engine, which starts nothing and notes in which order it would."""

    def __init__(self, config: LLMConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(config)
        self.steps: list[str] = []
        self.client = SimpleNamespace()
        self.contexts: list[CallbackCtx] = []

        async def initialize_node(config: LLMConfig) -> None:
            self.steps.append("node")

        async def init_app_state(client: object, state: Any, args: object) -> None:
            self.steps.append("app")
            state.openai_serving_models = SimpleNamespace(lora_requests={}, load_lora_adapter=None)
            state.serving_tokenization = "vLLM's own"

        # Else it starts a Ray to ask for one.
        monkeypatch.setattr(vllm_models.VLLMEngineConfig, "get_or_create_pg", lambda self: None)
        monkeypatch.setattr(vllm_engine, "initialize_node", initialize_node)
        monkeypatch.setattr("vllm.entrypoints.openai.api_server.init_app_state", init_app_state)

    def _prepare_engine_config(self, callback_ctx: CallbackCtx) -> tuple[Any, Any, Any]:
        self.steps.append("config")
        self.contexts.append(callback_ctx)
        model = SimpleNamespace(model="tiny", hf_config=PretrainedConfig())
        sizes = {"cache_config": SimpleNamespace(block_size=16)}
        sizes["scheduler_config"] = SimpleNamespace(max_num_batched_tokens=1)
        return SimpleNamespace(), SimpleNamespace(), SimpleNamespace(model_config=model, **sizes)

    def _start_async_llm_engine(self, *_: object) -> Any:
        self.steps.append("engine")
        return self.client

    def _validate_engine_client(self) -> None:
        """There is none."""


class NoDownload(CallbackBase):
    """What `replicas` configures, so that no node is prepared."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


@pytest.fixture
def config() -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": "tiny"})


async def test_the_engine_prepares_its_config_before_it_starts_it(
    config: LLMConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(config, monkeypatch)
    await engine.start()
    assert engine.steps == ["node", "config", "engine", "app"]
    assert engine._engine_client is engine.client
    assert engine._app_state.openai_serving_models is engine._oai_models
    assert parameters(VLLMEngine._prepare_engine_config) == ["self", "callback_ctx"]
    assert "distributed_executor_backend" in inspect.signature(vllm.config.ParallelConfig).parameters


async def test_ray_looks_for_tokenization_under_a_name_that_vllm_does_not_use(
    config: LLMConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this fails, `ReplicaEngine.start` can go."""
    engine = ScriptedEngine(config, monkeypatch)
    await engine.start()
    assert engine._app_state.serving_tokenization == "vLLM's own"
    (answer,) = [answer async for answer in engine.tokenize(SimpleNamespace(prompt="Hi"))]
    assert answer.error.code == 400
    request = SimpleNamespace(app=SimpleNamespace(state=engine._app_state))
    assert tokenize_router.tokenization(request) == "vLLM's own"


async def test_the_download_can_be_skipped(config: LLMConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{NoDownload.__module__}.{NoDownload.__qualname__}"
    config = config.model_copy(update={"callback_config": CallbackConfig(callback_class=path)})
    engine = ScriptedEngine(config, monkeypatch)
    await engine.start()
    assert engine.steps == ["config", "engine", "app"]
    assert CallbackCtx().run_init_node is True


def test_the_engine_answers_by_these_methods() -> None:
    for name in ("chat", "completions", "tokenize", "detokenize"):
        method = getattr(VLLMEngine, name)
        assert inspect.isasyncgenfunction(method)
        assert parameters(method) == ["self", "request", "raw_request_info"]


def test_the_server_is_constructed_and_started_as_we_override_it() -> None:
    assert {"llm_config", "engine_cls"} <= set(parameters(LLMServer.__init__))
    for name in ("_start_engine", "check_health", "record_routing_stats"):
        assert inspect.iscoroutinefunction(getattr(LLMServer, name))
    assert issubclass(ProgramServer, LLMServer)
    assert issubclass(ReplicaEngine, VLLMEngine)


@pytest.mark.parametrize(
    ("tools", "reasoning", "may_reason"), [(None, None, False), ("hermes", None, False), ("hermes", "qwen3", True)]
)
def test_the_parser_of_answers_says_whether_they_may_have_reasoning(
    tools: str | None, reasoning: str | None, may_reason: bool
) -> None:
    engine = ReplicaEngine.__new__(ReplicaEngine)
    parser = ParserManager.get_parser(tools, reasoning, enable_auto_tools=True)
    engine._oai_serving_chat = SimpleNamespace(parser_cls=parser)
    assert engine.may_reason is may_reason
    assert "self.parser_cls = ParserManager.get_parser(" in inspect.getsource(OpenAIServingChat.__init__)


async def test_a_server_starts_its_engine_when_it_is_made(config: LLMConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would start an actor, on any Ray cluster that this machine has, or on a new one.
    monkeypatch.setattr(llm_server, "push_telemetry_report_for_all_models", lambda all_models: None)
    started: list[object] = []

    class Engine(VLLMEngine):
        async def start(self) -> None:
            started.append(self)

    server = LLMServer.__new__(LLMServer)
    await LLMServer.__init__(server, config, engine_cls=Engine)
    assert started == [server.engine]


def test_no_method_of_ours_hides_one_of_rays_by_chance() -> None:
    ours = {name for name, value in vars(ProgramServer).items() if callable(value)} - {"__subclasshook__"}
    overridden = {"__init__", "__del__", "start", "_start_engine", "check_health", "record_routing_stats"}
    assert {name for name in ours if hasattr(LLMServer, name)} == overridden


def test_request_models_and_raw_requests() -> None:
    for name in (
        "ChatCompletionRequest",
        "CompletionRequest",
        "TokenizeChatRequest",
        "TokenizeCompletionRequest",
        "DetokenizeRequest",
        "ErrorResponse",
    ):
        assert name in vars(openai_api_models)
    request = RawRequestInfo(headers={"x-request-id": "a"}).to_starlette_request()
    assert request.headers["x-request-id"] == "a"
    for model in (openai_api_models.ChatCompletionRequest, openai_api_models.CompletionRequest):
        assert {"request_id", "session_id", "vllm_xargs", "stream"} <= model.model_fields.keys()


def test_vllms_errors_become_an_answer() -> None:
    told = create_error_response(ValueError("bad")).error
    assert (told.code, told.message) == (400, "bad")


def test_handles_address_sessions_and_all_replicas() -> None:
    assert {"session_id", "stream"} <= set(parameters(DeploymentHandle.options))
    assert parameters(DeploymentHandle.broadcast)[:2] == ["self", "method_name"]
    assert {"timeout_s", "return_exceptions"} <= set(parameters(DeploymentBroadcastResponse.results_async))
    assert callable(DeploymentResponseGenerator.cancel)


READ_BY_RAY = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH")


def test_ray_reads_where_our_callbacks_are_from_the_environment() -> None:
    code = f"from ray.serve._private import constants as c; print(*(getattr(c, name) for name in {READ_BY_RAY}))"
    environment = {**os.environ, **{name: f"module:{name.lower()}" for name in READ_BY_RAY}}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [environment[name] for name in READ_BY_RAY]


def test_a_port_is_reused_when_no_haproxy_that_was_replaced_can_send_to_it() -> None:
    name = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    code = f"from ray.serve._private import constants as c; print(c.{name}, c.RAY_SERVE_PORT_QUARANTINE_S > c.{name})"
    environment = {**os.environ, name: "3660"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3660", "True"]


def test_the_proxy_loads_our_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_util, READ_BY_RAY[0], IMPORT_PATH)
    options = http_util.configure_http_middlewares(HTTPOptions())
    assert [one.cls for one in options.middlewares] == [one.cls for one in middlewares()]


async def test_the_proxy_echoes_the_request_id() -> None:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"x-request-id", b"mine")]}
    await http_util.RequestIdMiddleware(app)(scope, None, send)
    assert (b"x-request-id", b"mine") in [(name.lower(), value) for name, value in sent[0]["headers"]]


def test_the_controller_looks_after_replicas_by_the_clock_that_we_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    assert isinstance(deployment_state.time, ModuleType)
    monkeypatch.setattr(deployment_state, "time", SimpleNamespace(time=lambda: now_s))
    checks = {"_last_health_check_time": now_s, "_health_check_ref": None, "health_check_period_s": 10.0}
    checks |= {"_last_record_routing_stats_time": now_s, "_record_routing_stats_ref": None}
    checks |= {"request_routing_stats_period_s": 10.0, "_has_user_routing_stats_method": True}
    seen = SimpleNamespace(**checks)
    replica = deployment_state.ActorReplicaWrapper
    due = (replica._should_start_new_health_check, replica._should_record_routing_stats)
    assert [one(seen) for one in due] == [False, False]
    now_s += 12.0
    assert [one(seen) for one in due] == [True, True]
    now_s -= 3600.0
    assert [one(seen) for one in due] == [False, False], "a clock that is set back stops it: why ours never is"


def test_the_proxies_are_looked_after_by_the_timer_that_we_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = inspect.signature(proxy_state.ProxyState.__init__).parameters["timer"].default
    monkeypatch.setattr(Timer, "time", lambda self: 7.0)
    assert timer.time() == 7.0


def test_serve_tells_how_a_start_goes() -> None:
    assert {"RUNNING", "DEPLOY_FAILED"} <= {status.value for status in ApplicationStatus}
    assert "UNHEALTHY" in {status.value for status in DeploymentStatus}
    assert "wait_for_applications_running" in parameters(serve.run_many)
    assert callable(ray.runtime_context.RuntimeContext.get_session_name)


def test_the_controller_says_where_its_proxies_are() -> None:
    """An ingress asks it whether Ray Serve's proxies are disabled."""
    assert set(parameters(ServeController.get_proxy_location)) <= {"self", "_ray_trace_ctx"}
    assert parameters(_get_global_client)[0] == "raise_if_no_controller_running"
    assert ProxyLocation.Disabled.value == "Disabled"
