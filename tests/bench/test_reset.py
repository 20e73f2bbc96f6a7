"""The reset between two blocks of a benchmark waits for the last turns."""

import aiohttp
import pytest

from cluster.core.errors import ConfigError
from cluster.offline.bench import server
from cluster.offline.bench.server import Server


async def test_a_server_whose_turns_end_is_reset(cluster_double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RESET_AGAIN_S", 0.01)
    cluster_double.busy_resets = 3
    async with aiohttp.ClientSession() as session:
        await Server(session, cluster_double.url).reset()
    assert cluster_double.admin == ["reset"]


async def test_a_server_that_stays_busy_is_an_error_with_its_reason(
    cluster_double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESET_AGAIN_S", 0.01)
    monkeypatch.setattr(server, "RESET_WITHIN_S", 0.05)
    cluster_double.busy_resets = 1000
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ConfigError, match=r"--policies: POST .*409.*turns that use the cache: 1"):
            await Server(session, cluster_double.url).reset()
    assert cluster_double.admin == []
