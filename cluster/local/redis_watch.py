"""Restarts the embedded Redis with its data when it ends by itself or is killed."""

import logging
import threading
from collections import deque
from typing import Self

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import ConfigError
from cluster.local.embedded_redis import EmbeddedRedis

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two checks whether the server runs. Until it is restarted, calls of Redis fail."""
MAX_RESTARTS = 5
RESTARTS_WINDOW_S = 60.0
"""Maximum number of attempts to restart the server within this number of seconds."""


class RedisWatch:
    """A thread that restarts an embedded Redis, as a context manager. At the end it stops the server.

    The server that it starts is killed by Linux when the thread ends, therefore the watch stops the server first.

    Args:
        redis: the server, which is started.
        clock: measures the time between restarts.
    """

    def __init__(self, redis: EmbeddedRedis, clock: Clock | None = None) -> None:
        self._redis = redis
        self._clock = clock or MonotonicClock()
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="embedded-redis-watch", daemon=True)
        self._failure: str | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with self._turn:
            self._redis.stop()
        self._thread.join()

    @property
    def failure(self) -> str | None:
        """The reason why the server is not restarted any more. None: it runs, or is being restarted."""
        return self._failure

    def _watch(self) -> None:
        attempts_s: deque[float] = deque(maxlen=MAX_RESTARTS)
        error = ""
        while not self._stopping.wait(POLL_S):
            with self._turn:
                if self._stopping.is_set() or self._redis.pid is not None:
                    continue
                now_s = self._clock.now_s()
                if len(attempts_s) == MAX_RESTARTS and now_s - attempts_s[0] < RESTARTS_WINDOW_S:
                    break
                attempts_s.append(now_s)
                error = self._restart()
        else:
            return
        self._failure = (
            f"the embedded Redis ended more than {MAX_RESTARTS} times within {RESTARTS_WINDOW_S:.0f} s"
            f" and is not restarted{error and ': '}{error}"
        )
        logger.error("%s", self._failure)

    def _restart(self) -> str:
        """Restart the server. Return the error; empty: it runs."""
        try:
            self._redis.restart()
        except (ConfigError, OSError) as error:
            logger.warning("the embedded Redis ended and a restart failed: %s", error)
            return str(error)
        logger.warning("the embedded Redis had ended and was restarted with its data")
        return ""
