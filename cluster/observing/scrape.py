"""`GET /metrics`: what the whole cluster exports, for those who cannot reach the ports of Ray's nodes."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import aiohttp
import ray
from starlette.responses import Response

from cluster import metrics
from cluster.clock import Clock
from cluster.observing.exposition import CONTENT_TYPE, gauge, merged

logger = logging.getLogger("ray.serve")

NODE_TIMEOUT_S = 5.0
"""A node that takes longer is left out. Prometheus waits ten seconds for the whole, where it is not told otherwise."""
PLAIN = {"Accept-Encoding": "identity"}
"""A node's agent would take longer to compress its page than to send it."""
NODES_AGE_S = 5.0
"""How old the list of nodes may be."""

Nodes = Callable[[], Awaitable[Sequence[str]]]
"""The addresses, `host:port`, at which nodes export their metrics."""


class ScrapeFailure(StrEnum):
    """Why a node is missing."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """It answers something else than 200."""


class ClusterScrape:
    """The nodes' exports, fetched when asked for, and merged.

    Args:
        clock: says how old the list of nodes is.
        nodes: which there are.
    """

    def __init__(self, clock: Clock, nodes: Nodes | None = None) -> None:
        self._clock = clock
        self._nodes = nodes or alive_nodes
        self._known: Sequence[str] = ()
        self._known_s: float | None = None
        self._session: aiohttp.ClientSession | None = None

    async def response(self) -> Response:
        """Of all nodes that answer in time; `caesura_scrape_failures` says how many did not."""
        failures: Counter[ScrapeFailure] = Counter()
        pages = await asyncio.gather(*(self._page(node, failures) for node in await self._addresses()))
        told = gauge(metrics.SCRAPE_FAILURES, ((kind.value, failures[kind]) for kind in ScrapeFailure))
        return Response(merged(page for page in pages if page is not None) + told, media_type=CONTENT_TYPE)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _addresses(self) -> Sequence[str]:
        now_s = self._clock.now_s()
        if self._known_s is None or now_s - self._known_s >= NODES_AGE_S:
            self._known, self._known_s = await self._nodes(), now_s
        return self._known

    async def _page(self, node: str, failures: "Counter[ScrapeFailure]") -> bytes | None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=NODE_TIMEOUT_S)
            self._session = aiohttp.ClientSession(headers=PLAIN, timeout=timeout)
        try:
            async with self._session.get(f"http://{node}/metrics") as answer:
                if answer.status == 200:
                    return await answer.read()
                failure = ScrapeFailure.REFUSED
        except TimeoutError:
            failure = ScrapeFailure.TIMEOUT
        except (aiohttp.ClientError, OSError):
            failure = ScrapeFailure.UNREACHABLE
        logger.debug("node %s was not scraped: %s", node, failure)
        failures[failure] += 1
        return None


async def alive_nodes() -> Sequence[str]:
    """Those of this process's Ray cluster."""
    nodes = await asyncio.to_thread(ray.nodes)
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes if node["Alive"]]
