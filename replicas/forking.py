"""EngineCore as a fork of its replica, on CPU: it shares what the replica has imported, and starts without importing.

vLLM spawns it inside a Ray actor, since a fork inherits Ray's threads' locks and sockets. EngineCore uses neither: what
runs in it is vLLM's engine loop alone, and a multiprocessing child ends without the parent's exit handlers. What it
must not do is outlive the replica, holding its sockets open: the kernel ends it with its parent.
"""

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.utils import system_utils

from cluster.heap import trim

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PR_SET_PDEATHSIG = 1

TITLE = "VLLM::EngineCore"
"""vLLM's own name for the process; after a fork from a Ray worker it cannot set it itself."""

_libc = ctypes.CDLL(None)
_set_title: Callable[[str], None] | None = None
"""None: a fork is not ours to prepare."""


@contextmanager
def forked_engine_core(set_title: Callable[[str], None]) -> Iterator[None]:
    """Within, vLLM forks its engine process. Linux only, and not after CUDA has been initialised.

    Args:
        set_title: gives a process its title.
    """
    global _set_title
    told, asked = os.environ.get(METHOD), system_utils.is_in_ray_actor
    # What is garbage, or would be moved by a collection, would be copied in the child page by page.
    gc.collect()
    trim()
    gc.freeze()
    _set_title, os.environ[METHOD], system_utils.is_in_ray_actor = set_title, "fork", lambda: False
    try:
        yield
    finally:
        _set_title, system_utils.is_in_ray_actor = None, asked
        if told is None:
            del os.environ[METHOD]
        else:
            os.environ[METHOD] = told


def _prepare_engine_core() -> None:
    if _set_title is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _set_title(TITLE)


os.register_at_fork(after_in_child=_prepare_engine_core)
