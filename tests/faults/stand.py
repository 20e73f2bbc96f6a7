"""The cluster under test: `caesura serve` in processes that can be told apart, its Redis and its tools in the tests'.

Nothing here knows of a test: what is killed, and what is promised then, is in the tests.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import yaml

from cluster.local.embedded_redis import EmbeddedRedis
from tests.faults.proxy import Wire
from tests.serving.served import EXACT, ROOT, serving
from tests.serving.tool_site import FLOOD_CAP_BYTES, ToolSite

ENGINE_SIDE = Path(__file__).parent / "engine_side"
"""What the engines of a stand can import."""
MARK = "CAESURA_TEST_STAND"
"""Environment variable by which the processes of one stand are known, whoever their parent is by now."""
READY_WITHIN_S = 180.0
GONE_WITHIN_S = 20.0
POLL_S = 0.05

NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SMALL: dict[str, dict[str, Any]] = {
    "http": {"port": 0, "max_body_bytes": 1 << 20},
    "replicas": {"count": 2, "kv_cache_bytes": 32 << 20},
    "engine": EXACT | {"logits_processors": ["breaking:Breaking"]},
    "redis": {"refresh_s": 0.2},
    "programs": {"lease_s": 2.0},
}
"""Two replicas of the tiny model, quick to answer: each is the other's spare."""


@dataclass(frozen=True)
class Stand:
    """A cluster that serves.

    Attributes:
        url: of its HTTP surface, without a slash at the end.
        pid: of `caesura serve`, Ray's driver.
        redis: its store, which a test may kill and start again.
        wire: to the store, which a test may slow down, or cut.
        site: where its tools are.
        mark: in the environment of each of its processes.
    """

    url: str
    pid: int
    redis: EmbeddedRedis
    wire: Wire
    site: ToolSite
    mark: str

    @property
    def family(self) -> list[psutil.Process]:
        """Every process of it that lives now; Redis is not among them."""
        return marked(self.mark)

    def named(self, title: str) -> list[psutil.Process]:
        """Those whose title has ``title`` in it: one of the constants below, or `raylet`, `gcs_server`."""
        return [process for process in self.family if title in title_of(process)]

    def replicas(self) -> list[dict[str, Any]]:
        """What each replica says of itself; none while nobody answers. ``pid`` is the actor's."""
        try:
            answer = httpx.get(f"{self.url}/admin/statistics", timeout=10.0)
        except httpx.TransportError:
            return []
        return list(answer.json()["replicas"]) if answer.status_code == 200 else []

    def await_whole(self, count: int = 2) -> None:
        """Until this many replicas serve, each with an engine, and the probe says ready.

        Raises:
            AssertionError: not within READY_WITHIN_S.
        """

        def whole() -> bool:
            pids = {one["pid"] for one in self.replicas()}
            living = {process.pid for process in self.named(REPLICA)}
            return len(pids) == count and pids <= living and httpx.get(f"{self.url}/ready", timeout=10.0).is_success

        until(whole, f"no {count} replicas serve", READY_WITHIN_S)

    def check_idle(self, within_s: float = 30.0) -> None:
        """Nothing runs, waits or is held in any replica any more.

        Raises:
            AssertionError: not within ``within_s``.
        """

        def idle() -> bool:
            told = self.replicas()
            return bool(told) and all(one["running"] == one["waiting"] == 0 for one in told)

        until(idle, "a replica still works", within_s)


REPLICA = "ServeReplica:caesura:ProgramServer"
INGRESS = "ServeReplica:caesura:Ingress"
TOOLS = "ToolActor"
ENGINE = "VLLM::EngineCore"
CONTROLLER = "ServeController"
PROXY = "ProxyActor"


@contextmanager
def stand(directory: Path, site: ToolSite, **sections: Mapping[str, Any]) -> Iterator[Stand]:
    """A cluster of a small configuration; afterwards nothing of it is left.

    Args:
        directory: for its files.
        site: where its tools are.
        sections: of the configuration, key by key over the small one.
    """
    mark = uuid.uuid4().hex
    with EmbeddedRedis(directory / "redis") as redis, Wire(int(urlsplit(redis.url).port or 0)) as wire:
        file = directory / "caesura.yaml"
        url = redis.url.replace(f":{urlsplit(redis.url).port}/", f":{wire.port}/")
        file.write_text(yaml.safe_dump(configuration(url, site, sections)), encoding="utf-8")
        try:
            with serving(file, **{MARK: mark, "PYTHONPATH": f"{ROOT}:{ENGINE_SIDE}"}) as cluster:
                yield Stand(cluster.url, cluster.pid, redis, wire, site, mark)
        finally:
            _, alive = psutil.wait_procs(marked(mark), timeout=GONE_WITHIN_S)
            for process in alive:
                process.kill()


def configuration(store_url: str, site: ToolSite, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The small configuration with other values here and there."""
    base = SMALL | {"redis": SMALL["redis"] | {"url": store_url}, "tools": {"defined": tools(site)}}
    return {key: {**base.get(key, {}), **sections.get(key, {})} for key in base | dict(sections)}


def tools(site: ToolSite) -> dict[str, dict[str, Any]]:
    """Tools without arguments, by what they do: `book`, `look` and `watched` end when the site's gate is open."""
    post = {"kind": "http", "method": "POST", "parameters": NOTHING, "private_addresses": True}
    return {
        "book": {**post, "url": f"{site.url}/book", "description": "Has an effect."},
        "look": {**post, "url": f"{site.url}/book", "idempotent": True, "retries": 0},
        "watched": {**post, "url": f"{site.url}/watched"},
        "nap": {**post, "url": f"{site.url}/nap", "deadline_s": 10.0},
        "hang": {**post, "url": f"{site.url}/hang", "deadline_s": 2.0},
        "flood": {**post, "url": f"{site.url}/flood", "output_cap_bytes": FLOOD_CAP_BYTES},
        "obey": {**post, "url": f"{site.url}/obey"},
    }


def marked(mark: str) -> list[psutil.Process]:
    """The processes that live and have this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it ended, or it is somebody else's
    return found


def title_of(process: psutil.Process) -> str:
    """Its command line: what it calls itself; nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
    """What ``condition`` says once it is true.

    Raises:
        AssertionError: not within ``within_s``; it says ``what``.
    """
    deadline_s = time.monotonic() + within_s
    while not (told := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)
    return told
