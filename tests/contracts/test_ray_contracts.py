"""Every private name of Ray Serve LLM 2.60.0 that Caesura uses, and of vLLM behind it, still is what it was."""

import inspect
from importlib.metadata import version
from types import ModuleType

import ray
import vllm.config
from ray import serve
from ray._common.utils import Timer
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackCtx
from ray.llm._internal.serve.core.configs import openai_api_models
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve._private import constants, deployment_state, http_util, proxy_state
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle, DeploymentResponseGenerator
from ray.serve.llm import LLMConfig
from ray.serve.schema import ApplicationStatus, DeploymentStatus
from vllm.entrypoints.launchers.api_server import app_state
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from cluster.http_front import IMPORT_PATH, middlewares
from replicas.engine import ReplicaEngine
from replicas.server import ProgramServer


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_version_is_pinned():
    assert ray.__version__ == version("ray") == "2.60.0"


def test_the_engine_prepares_its_config_before_it_starts_it():
    assert parameters(VLLMEngine._prepare_engine_config) == ["self", "callback_ctx"]
    source = inspect.getsource(VLLMEngine.start)
    assert source.index("self._prepare_engine_config(") < source.index("self._start_async_llm_engine(")
    assert "self._engine_client =" in source
    assert "self._app_state = state" in source
    assert "distributed_executor_backend" in inspect.signature(vllm.config.ParallelConfig).parameters


def test_ray_looks_for_tokenization_under_a_name_that_vllm_does_not_use():
    """When this fails, `ReplicaEngine.start` can go."""
    assert '"openai_serving_tokenization"' in inspect.getsource(VLLMEngine.start)
    assert "state.serving_tokenization = " in inspect.getsource(app_state)
    assert "self._oai_serving_tokenization" in inspect.getsource(VLLMEngine.tokenize)


def test_the_engine_answers_by_these_methods():
    for name in ("chat", "completions", "tokenize", "detokenize"):
        method = getattr(VLLMEngine, name)
        assert inspect.isasyncgenfunction(method)
        assert parameters(method) == ["self", "request", "raw_request_info"]


def test_the_server_is_constructed_and_started_as_we_override_it():
    assert {"llm_config", "engine_cls"} <= set(parameters(LLMServer.__init__))
    assert "await self.start()" in inspect.getsource(LLMServer.__init__)
    assert "self._start_engine()" in inspect.getsource(LLMServer.start)
    for name in ("_start_engine", "check_health", "record_routing_stats"):
        assert inspect.iscoroutinefunction(getattr(LLMServer, name))
    assert issubclass(ProgramServer, LLMServer)
    assert issubclass(ReplicaEngine, VLLMEngine)


def test_no_method_of_ours_hides_one_of_rays_by_chance():
    ours = {name for name, value in vars(ProgramServer).items() if callable(value)} - {"__subclasshook__"}
    overridden = {"__init__", "start", "_start_engine", "check_health", "record_routing_stats"}
    overridden |= {"__serve_build_asgi_app__"}
    assert {name for name in ours if hasattr(LLMServer, name)} == overridden


def test_the_download_can_be_skipped():
    assert CallbackCtx().run_init_node is True
    assert inspect.iscoroutinefunction(CallbackBase.on_before_node_init)
    assert "callback.ctx.run_init_node" in inspect.getsource(VLLMEngine.start)
    assert "callback_config" in LLMConfig.model_fields


def test_request_models_and_raw_requests():
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


def test_vllms_errors_become_an_answer():
    told = create_error_response(ValueError("bad")).error
    assert (told.code, told.message) == (400, "bad")


def test_handles_address_sessions_and_all_replicas():
    assert {"session_id", "stream"} <= set(parameters(DeploymentHandle.options))
    assert parameters(DeploymentHandle.broadcast)[:2] == ["self", "method_name"]
    assert {"timeout_s", "return_exceptions"} <= set(parameters(DeploymentBroadcastResponse.results_async))
    assert callable(DeploymentResponseGenerator.cancel)


def test_the_proxy_loads_our_guard_and_echoes_the_request_id():
    assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in inspect.getsource(constants)
    http_util.validate_http_proxy_callback_return(middlewares())
    assert IMPORT_PATH.rpartition(".")[2] == middlewares.__name__
    assert 'headers.append("X-Request-ID"' in inspect.getsource(http_util.RequestIdMiddleware)


def test_the_controller_loads_our_clock_and_waits_by_it():
    assert "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH" in inspect.getsource(constants)
    assert isinstance(deployment_state.time, ModuleType)
    assert inspect.getsource(deployment_state).count("time.time() - self._last_health_check_time") >= 4
    assert list(inspect.signature(Timer.time).parameters) == ["self"]
    assert "timer: TimerBase = Timer()" in inspect.getsource(proxy_state)


def test_serve_tells_how_a_start_goes():
    assert {"RUNNING", "DEPLOY_FAILED"} <= {status.value for status in ApplicationStatus}
    assert "UNHEALTHY" in {status.value for status in DeploymentStatus}
    assert "wait_for_applications_running" in parameters(serve.run_many)
    assert callable(ray.runtime_context.RuntimeContext.get_session_name)
