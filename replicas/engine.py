"""The vLLM engine of a replica, as Ray Serve LLM 2.60 starts it.

It overrides these private methods of `ray.llm`'s VLLMEngine (tests/contracts/test_ray_contracts.py checks each name):
    start                    finds /tokenize, which vLLM 0.29 keeps under another name than Ray 2.60 looks for; gives
                             vLLM's serving layer the engine through a ContinuedClient
    _prepare_engine_config   saves one process on CPU; uses the configured KV cache size; completes the settings of
                             the KV tiers
    _start_async_llm_engine  forks EngineCore on CPU
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import ray
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm import envs
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse

from replicas.crash_attribution import died_by_itself, shared_suspect
from replicas.grammar_trials import trials_of
from replicas.host_tier import fit_tiers
from replicas.resumption import ContinuedClient
from replicas.settings import in_one_process
from replicas.stop_strings import mark_stopped
from replicas.token_requests import TokenRequest, generated
from replicas.vllm_patches import forked_engine_core, share_rendering

logger = logging.getLogger("ray.serve")


class LocalModel(CallbackBase):
    """Ray's hook before it downloads a model. Local files need no download and no process for it."""

    async def on_before_node_init(self) -> None:
        """Skip the download. The engine calls this when it starts."""
        self.ctx.run_init_node = False


def lora_modules(modules: Sequence[Any]) -> list[LoRAModulePath]:
    """Return vLLM's entries of adapters, which Ray passes as plain values."""
    return [one if isinstance(one, LoRAModulePath) else LoRAModulePath(**one) for one in modules]


class ReplicaEngine(VLLMEngine):
    """A vLLM engine in EngineCore's process. On CPU without tensor parallelism its worker runs in that process too.

    Ray requires the `mp` executor on CPU, which costs a third process for each replica: twice the memory and the
    start-up time.
    """

    async def start(self) -> None:
        """Start the engine's process, which loads the model, and put the client that knows of streams before it."""
        with shared_suspect() as self._suspect:
            await super().start()
        self._oai_serving_tokenization = self._app_state.serving_tokenization
        self._serving_tokens = self._app_state.serving_tokens
        self.watch_streams()

    def watch_streams(self) -> None:
        """Put the ContinuedClient, which knows of streams, between vLLM's serving layer and the engine."""
        trials = trials_of(self._engine_client)
        if not self._engine_client.vllm_config.model_config.skip_tokenizer_init:  # otherwise nothing is compiled
            trials.start()
        mark_stopped(self._engine_client)
        self.streams = ContinuedClient(self._engine_client, trials)
        for serving in (self._oai_serving_chat, self._oai_serving_completion, self._serving_tokens):
            serving.engine_client = self.streams
        share_rendering(self._engine_client.renderer)

    def generate(
        self, request: TokenRequest, raw_request_info: RawRequestInfo
    ) -> AsyncGenerator[str | GenerateResponse | ErrorResponse]:
        """Return the answer to a request of token ids, as the other methods do for theirs."""
        return generated(self._serving_tokens, request, raw_request_info)

    def _prepare_engine_config(self, callback_ctx: Any) -> tuple[Any, Any, Any]:
        engine_args, frontend_args, config = super()._prepare_engine_config(callback_ctx)
        if modules := getattr(frontend_args, "lora_modules", None):  # Ray passes what the configuration has
            frontend_args.lora_modules = lora_modules(modules)
        in_one_process(config, engine_args)
        fit_tiers(config)
        return engine_args, frontend_args, config

    def _start_async_llm_engine(self, engine_args: Any, config: Any, placement_group: Any) -> Any:
        on_cpu = config.device_config.device_type == "cpu"
        with forked_engine_core(ray._raylet.setproctitle) if on_cpu else nullcontext():
            return super()._start_async_llm_engine(engine_args, config, placement_group)

    async def log_for_ever(self) -> NoReturn:
        """Let vLLM log its statistics every ``VLLM_LOG_STATS_INTERVAL`` seconds, as vLLM's own server does.

        Ray does not do this. vLLM's loggers keep what they gather, such as each copy to or from the host tier, until
        they write a line.
        """
        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            try:
                await self._engine_client.do_log_stats()
            except Exception:  # a replica that serves does not end for a line in its log
                logger.exception("vLLM could not log its statistics")

    def broken_by(self, name: str | None) -> bool:
        """Return whether the engine, which is dead, was crashed by the request of this name."""
        return name is not None and self._suspect.is_turn(name) and died_by_itself(self._engine_client)

    @property
    def client(self) -> Any:
        """vLLM's AsyncLLM, or None before the start."""
        return self._engine_client

    @property
    def chat_renderer(self) -> Any:
        """vLLM's OnlineRenderer, which makes the prompts of chat requests."""
        return self._oai_serving_chat.online_renderer

    @property
    def may_reason(self) -> bool:
        """Whether answers may have reasoning: vLLM has a parser of it, or its way of parsing is not known here."""
        parser = getattr(self._oai_serving_chat, "parser_cls", object)
        return parser is not None and getattr(parser, "reasoning_parser_cls", object) is not None
