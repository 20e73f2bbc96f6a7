"""AMX, Intel's matrix instructions: vLLM's attention on CPU uses them where the processor has them.

Linux lets only those processes use them that have asked, and ends others with SIGILL. vLLM leaves the asking to oneDNN,
which asks for its own products, and not always before vLLM's attention runs. A plugin is called in each process.
"""

import logging

import torch

logger = logging.getLogger(__name__)


def ask_for_amx() -> None:
    """A plugin of vLLM (``vllm.general_plugins`` in pyproject.toml): ask for this process and those that it forks."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("this processor has AMX, but the kernel refuses it: vLLM's attention in bfloat16 would end here")
