"""A store's password may stand in a file, such as a mounted secret, and not in the configuration."""

from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from cluster.core.errors import ConfigError
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import connect


@pytest.mark.parametrize("connections", [None, 2])
async def test_the_file_says_the_password(tmp_path: Path, connections: int | None) -> None:
    path = tmp_path / "the password"
    with EmbeddedRedis() as server:
        parts = urlsplit(server.url)
        path.write_text(f"{parts.password}\n")
        url = f"redis://{parts.hostname}:{parts.port}/0?password_file={quote(str(path))}&health_check_interval=7"
        async with connect(url, connections=connections) as client:
            assert await client.ping()
            assert client.connection_pool.connection_kwargs["health_check_interval"] == 7


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: password_file: cannot be read"):
        connect(f"redis://somewhere?password_file={tmp_path / 'nothing'}")
