"""Asks Linux for AMX, Intel's matrix instructions, which vLLM's attention on CPU uses where the processor has them.

Linux permits AMX only to processes that have requested it, and ends other processes with SIGILL. vLLM leaves the
request to oneDNN. oneDNN makes it for its own operations, which is sometimes after vLLM's attention has run. vLLM calls
a plugin in each of its processes.
"""

import logging

import torch

logger = logging.getLogger(__name__)


def ask_for_amx() -> None:
    """Request AMX for this process and for those that it forks.

    This is a plugin of vLLM (``vllm.general_plugins`` in pyproject.toml). A refusal by the kernel is logged, not
    raised.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("this processor has AMX, but the kernel refuses it: vLLM's attention in bfloat16 would end here")
