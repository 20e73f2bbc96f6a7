"""vLLM's engine arguments: which names there are, and what they become on CPU."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's own condition for the in-process executor on CPU
    "OMP_NUM_THREADS": "1",  # a replica's threads fight each other on a small model: 649 against 114 tokens/s measured
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",  # of 1,024: steps are of all lengths, and each leaves a kernel
    "TOKENIZERS_PARALLELISM": "false",  # its threads would not survive the fork of EngineCore
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of a CPU replica; what the machine sets beside it stays."""


def unknown_engine_arguments(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the installed vLLM does not know, in their order. Imports vLLM: seconds.

    Ray Serve LLM takes both kinds through its ``engine_kwargs``: ``chat_template``, for one, is of the surface.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {field.name for kind in (AsyncEngineArgs, FrontendArgs) for field in fields(kind) if field.init}
    return [name for name in names if name not in known]


def in_one_process(config: Any, arguments: Any) -> None:
    """Make vLLM's configuration of a CPU engine as a replica runs it; of any other it stays as it is.

    vLLM's worker gets no process of its own, and the KV cache size of the arguments counts.

    Args:
        config: the VllmConfig, changed in place.
        arguments: the AsyncEngineArgs that it was made from.
    """
    if arguments.kv_cache_memory_bytes is not None:
        # On CPU the machine's VLLM_CPU_KVCACHE_SPACE would win over the configuration.
        config.cache_config.kv_cache_memory_bytes = arguments.kv_cache_memory_bytes
    if config.device_config.device_type == "cpu" and config.parallel_config.world_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"
