"""One real local cluster for all tests of this directory that ask for it: two replicas of the tiny model, little KV."""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.config import CaesuraConfig
from cluster.serving import LocalCluster

KV_BYTES = 16 << 20
CONTEXT_TOKENS = 4096


def cluster_config(**sections: dict[str, Any]) -> CaesuraConfig:
    """Small, quick to answer, on a free port."""
    base: dict[str, dict[str, Any]] = {
        "http": {"port": 0, "max_concurrent_requests": 48, "max_body_bytes": 1 << 20},
        "replicas": {"count": 2, "kv_cache_bytes": KV_BYTES},
        "engine": {"max_model_len": CONTEXT_TOKENS, "max_num_seqs": 32},
        "policy": {"name": "continuum"},
        "store": {"refresh_s": 0.2},
    }
    return CaesuraConfig.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """The shared cluster; afterwards no process of it is left."""
    local = LocalCluster(cluster_config())
    with local:
        yield local
    assert local.processes == []


@pytest.fixture(scope="session")
def client(cluster: LocalCluster) -> Iterator[httpx.Client]:
    """A client of the shared cluster."""
    with httpx.Client(base_url=cluster.url, timeout=60, verify=False) as http:
        yield http


@pytest.fixture(autouse=True)
def _no_cluster_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS" not in os.environ
