"""Why Ray's own disaggregated prefill does not serve Caesura's turns (ADR 17). If a test fails, read the ADR again."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest, ErrorInfo, ErrorResponse
from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend
from ray.llm._internal.serve.serving_patterns.prefill_decode import builder
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDDecodeServer, PDPrefillServer
from ray.serve.llm import LLMConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from replicas.server import ProgramServer


def test_the_builder_uses_its_own_servers_in_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ProgramServer` has the identity of programs, continued streams and the holds' control. Nothing can replace
    Ray's two classes, `server_cls` neither."""
    built: list[type] = []

    def record(config: LLMConfig, *, deployment_cls: type, **_: Any) -> str:
        built.append(deployment_cls)
        if len(built) == 2:
            raise InterruptedError  # before the ingress, which needs a cluster
        return "bound"

    monkeypatch.setattr(builder, "build_llm_deployment", record)
    config = {
        "model_loading_config": {"model_id": "m"},
        "engine_kwargs": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        "server_cls": "replicas.server:ProgramServer",
    }
    with pytest.raises(InterruptedError):
        builder.build_pd_openai_app({"prefill_config": config, "decode_config": config})
    assert built == [PDPrefillServer, PDDecodeServer]
    assert not any(issubclass(one, ProgramServer) for one in built)


async def test_each_prompt_is_computed_remotely_however_short_and_whatever_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decode server asks neither its own cache nor the length of the prompt."""
    sent: list[Any] = []

    class Prefill:
        """A handle of the prefill deployment, which fails, so that nothing is decoded."""

        @property
        def completions(self) -> Any:
            async def remote(request: Any, info: Any) -> AsyncIterator[Any]:
                sent.append(request)
                yield ErrorResponse(error=ErrorInfo(message="the test ends here", type="x", code=500))

            return SimpleNamespace(remote=remote)

    monkeypatch.setattr(serve, "get_multiplexed_model_id", lambda: "")
    server = object.__new__(PDDecodeServer)
    server._prefill_handle = Prefill()
    server._connector_backend_cache = NixlConnectorBackend(LLMConfig(model_loading_config={"model_id": "m"}))
    request = CompletionRequest(model="m", prompt=[1, 2, 3])
    answers = [one async for one in server._pd_handle_request(request)]
    assert [one.error.message for one in answers] == ["the test ends here"], "the failure ends the turn, too"
    assert [one.prompt for one in sent] == [[1, 2, 3]]


def test_its_connector_takes_the_place_of_the_host_and_disk_tiers() -> None:
    """An engine has one connector. `replicas.swapping` and `replicas.disk_tier` are parts of vLLM's offloading one."""
    assert not issubclass(NixlConnector, OffloadingConnector)
