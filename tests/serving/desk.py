"""The desk server in a process of its own, for tests that bring an MCP server which nobody else knows, and places
where its secret must not stand.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from redis import Redis

SCRIPT = Path(__file__).with_name("desk_server.py")


def fingerprint(secret: str) -> str:
    """What `badge` tells of a bearer token."""
    return hashlib.sha256(f"Bearer {secret}".encode()).hexdigest()


class Desk:
    """A server of the test's, in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.url = f"http://127.0.0.1:{int(self.said())}/mcp"

    def said(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, and close its pipe."""
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def offered(self, **more: Any) -> Any:
        """The tool of a response that brings it."""
        return {"type": "mcp", "server_label": "desk", "server_url": self.url, "require_approval": "never", **more}


def held_by_redis(url: str, secret: str) -> list[str]:
    """The keys under which the secret stands, in whatever form."""
    found = []
    readers: dict[bytes, Callable[[Redis, bytes], Any]] = {
        b"string": lambda redis, key: redis.get(key),
        b"hash": lambda redis, key: redis.hgetall(key),
        b"list": lambda redis, key: redis.lrange(key, 0, -1),
        b"set": lambda redis, key: redis.smembers(key),
        b"zset": lambda redis, key: redis.zrange(key, 0, -1),
        b"stream": lambda redis, key: redis.xrange(key),
    }
    with Redis.from_url(url) as redis:
        for key in redis.scan_iter():
            value = readers[redis.type(key)](redis, key)
            if secret in repr((key, value)):
                found.append(key.decode(errors="replace"))
    return found


def logs_with(secret: str) -> list[str]:
    """Files of the session in which the secret stands."""
    logs = Path("/tmp/ray", ray.get_runtime_context().get_session_name(), "logs")
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if secret.encode() in path.read_bytes()]
