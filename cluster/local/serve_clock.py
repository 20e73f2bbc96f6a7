"""Patches Ray Serve's controller, so that a wall clock that is set back does not stop it.

Ray Serve 2.60 checks replicas and proxies, and collects the replicas' routing statistics, at intervals of the wall
clock. Without this module, a clock that is set back by an hour would stop both for an hour. Ray loads the module by
``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``. tests/contracts/test_ray_contracts.py checks the patched names.
"""

import time
from typing import Any

from ray._common.utils import Timer
from ray.serve._private import deployment_state


class NeverBack:
    """The module `time`, with a wall clock that never goes back.

    Its time is at least its last reading plus the monotonic time since.
    """

    def __init__(self) -> None:
        self._told_s, self._told_at_s = time.time(), time.monotonic()

    def time(self) -> float:
        """Return the Unix time in seconds. It may be ahead of a wall clock that was set back."""
        now_s = time.monotonic()
        self._told_s = max(time.time(), self._told_s + now_s - self._told_at_s)
        self._told_at_s = now_s
        return self._told_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def never_back() -> None:
    """Install the patch. The controller calls it before anything is deployed."""
    clock = NeverBack()
    deployment_state.time = clock
    Timer.time = lambda self: clock.time()
