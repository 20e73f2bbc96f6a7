"""In the process of Serve's controller: a wall clock that is set back does not stop it.

Ray Serve 2.60 checks its replicas and proxies, and collects what replicas report to the router, at intervals of the
wall clock. Without this module, a clock that is set back by an hour would stop both for an hour. Ray loads it by
``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``. (tests/contracts/test_ray_contracts.py holds the names.)
"""

import time
from typing import Any

from ray._common.utils import Timer
from ray.serve._private import deployment_state


class NeverBack:
    """The module `time`, with a wall clock that is never behind what it has told and what has passed since."""

    def __init__(self) -> None:
        self._told_s, self._told_at_s = time.time(), time.monotonic()

    def time(self) -> float:
        """Seconds since the epoch, or more."""
        now_s = time.monotonic()
        self._told_s = max(time.time(), self._told_s + now_s - self._told_at_s)
        self._told_at_s = now_s
        return self._told_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def never_back() -> None:
    """What the controller calls, before anything is deployed."""
    clock = NeverBack()
    deployment_state.time = clock
    Timer.time = lambda self: clock.time()
