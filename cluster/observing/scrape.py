"""`GET /metrics`: the metrics of the cluster, for a Prometheus that cannot reach the ports of Ray's nodes.

The pages of the nodes are merged as lines of text. Parsing them with `prometheus_client` would take twenty times as
long, in the process that serves requests.

Ray's agent exports the counters and histograms of a process until its node ends, and gauges until 20 s after the
process has ended. Each of Ray's processes has gauges, Ray's own at least. A process without any has therefore ended,
and its other series are left out.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

import aiohttp
import ray
from starlette.responses import Response

from cluster.core.clock import Clock
from cluster.observing import catalogue as metrics
from cluster.observing.meter import Meter

logger = logging.getLogger("ray.serve")

NODE_TIMEOUT_S = 5.0
"""Timeout of a node's page in seconds. A slower node is left out. Prometheus waits ten seconds by default."""
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""Header that asks for pages without compression. A node's agent takes longer to compress its page than to send it."""
NODES_AGE_S = 5.0
"""Maximum age of the list of nodes in seconds."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

KEPT = ((b"ray_caesura_", b"caesura_"), (b"ray_vllm_", b"vllm:"))
"""Prefixes of the names of metrics that are kept, and the replacement of each."""
_WORKER = re.compile(rb'[{,]WorkerId="([^"]+)"')
"""The label with which Ray names the process of a sample."""
_CONSTANT_LABELS = re.compile(rb',(?:otel_scope_[a-z_]+|Version)="[^"]*"')

Nodes = Callable[[], Awaitable[Sequence[str]]]
"""A function that returns the addresses (`host:port`) at which nodes export their metrics."""


class ScrapeFailure(StrEnum):
    """The reason why a node's metrics are missing."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    HTTP_STATUS = "http_status"
    """The status of the node's answer was not 200."""


class ClusterScrape:
    """Fetches the pages of all nodes on each request, and merges them.

    Args:
        clock: measures the age of the list of nodes.
        meter: counts the nodes that could not be read.
        nodes: lists the nodes; None: the alive nodes of the Ray cluster.
    """

    def __init__(self, clock: Clock, meter: Meter, nodes: Nodes | None = None) -> None:
        self._clock = clock
        self._meter = meter
        self._nodes = nodes or alive_nodes
        self._known: Sequence[str] = ()
        self._known_s: float | None = None
        self._session: aiohttp.ClientSession | None = None
        for reason in ScrapeFailure:
            meter.begin(metrics.SCRAPE_FAILURES, reason=reason.value)

    async def response(self) -> Response:
        """Return the metrics of all nodes that answer in time, or 503 if none does."""
        pages = await asyncio.gather(*(self._page(node) for node in await self._addresses()))
        found = [page for page in pages if page is not None]
        status = HTTPStatus.SERVICE_UNAVAILABLE if pages and not found else HTTPStatus.OK
        return Response(merged(found), status, media_type=CONTENT_TYPE)

    async def aclose(self) -> None:
        """Close the HTTP connections to the nodes. It is called once, after the last scrape."""
        if self._session is not None:
            await self._session.close()

    async def _addresses(self) -> Sequence[str]:
        now_s = self._clock.now_s()
        if self._known_s is None or now_s - self._known_s >= NODES_AGE_S:
            self._known, self._known_s = await self._nodes(), now_s
        return self._known

    async def _page(self, node: str) -> bytes | None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=NODE_TIMEOUT_S)
            self._session = aiohttp.ClientSession(headers=UNCOMPRESSED, timeout=timeout)
        try:
            async with self._session.get(f"http://{node}/metrics") as answer:
                if answer.status == HTTPStatus.OK:
                    return await answer.read()
                failure = ScrapeFailure.HTTP_STATUS
        except TimeoutError:
            failure = ScrapeFailure.TIMEOUT
        except (aiohttp.ClientError, OSError):
            failure = ScrapeFailure.UNREACHABLE
        logger.debug("node %s was not scraped: %s", node, failure)
        self._meter.add(metrics.SCRAPE_FAILURES, 1, reason=failure.value)
        return None


async def alive_nodes() -> Sequence[str]:
    """Return the addresses of the alive nodes of this process's Ray cluster."""
    nodes = await asyncio.to_thread(ray.nodes)
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes if node["Alive"]]


@dataclass(slots=True)
class _Family:
    head: dict[bytes, bytes] = field(default_factory=dict)
    """The HELP and TYPE lines, by their first word."""
    samples: list[bytes] = field(default_factory=list)


def merged(pages: Iterable[bytes]) -> bytes:
    """Merge pages into one, which has each kept family once, with the samples of all pages.

    Series of processes that have ended are left out. Ray's prefix of names and the labels that are the same on all
    samples are removed.
    """
    families: dict[bytes, _Family] = {}
    for page in pages:
        family, page_lines = _Family(), page.splitlines()
        alive = _workers_with_gauges(page_lines)
        for line in page_lines:
            keyword = line[:7] if line.startswith((b"# HELP ", b"# TYPE ")) else b""
            renamed = _renamed(line[len(keyword) :])
            if renamed is None:
                continue
            if keyword:
                family = families.setdefault(renamed.partition(b" ")[0], _Family())
                family.head.setdefault(keyword, keyword + renamed)
            elif not alive or (worker := _WORKER.search(renamed)) is None or worker[1] in alive:
                # In the text format the samples of a family follow its HELP and TYPE.
                family.samples.append(renamed)
    lines = (line for family in families.values() for line in (*family.head.values(), *family.samples))
    return _CONSTANT_LABELS.sub(b"", b"".join(line + b"\n" for line in lines))


def _workers_with_gauges(lines: Iterable[bytes]) -> set[bytes]:
    """Return the processes that have a gauge. It is empty if Ray is configured to leave out their label."""
    found: set[bytes] = set()
    is_gauge = False
    for line in lines:
        if line.startswith(b"#"):
            is_gauge = line.startswith(b"# TYPE ") and line.endswith(b" gauge")
        elif is_gauge and (worker := _WORKER.search(line)) is not None:
            found.add(worker[1])
    return found


def _renamed(line: bytes) -> bytes | None:
    """Replace Ray's prefix in a line that begins with a metric's name; None: the metric is not kept."""
    for theirs, ours in KEPT:
        if line.startswith(theirs):
            return ours + line[len(theirs) :]
    return None
