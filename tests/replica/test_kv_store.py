"""KV stores of other projects: what is rendered is what the installed vLLM's connectors read."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector, worker

from cluster.app import engine_kwargs
from cluster.config.model_features import seeing_models
from cluster.config.models import KvStoreConfig, ReplicaConfig
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, ConfigError, UpstreamFailed
from cluster.store.weights import WeightsTarget
from replicas.kv_store import check_installed, store_environment, store_transfer_config
from replicas.weights import ReplicaWeights

LMCACHE = KvStoreConfig(name="lmcache", address="node.local:5555")
MOONCAKE = KvStoreConfig(name="mooncake", config_file="/etc/mooncake.json")


@pytest.mark.parametrize("store", [LMCACHE, MOONCAKE], ids=["lmcache", "mooncake"])
def test_vllm_has_the_connector(store: KvStoreConfig) -> None:
    config = KVTransferConfig(**store_transfer_config(store))
    assert config.kv_connector in KVConnectorFactory._registry
    assert config.is_kv_producer
    assert config.is_kv_consumer


def test_lmcache_gets_the_address_of_its_server() -> None:
    extra = store_transfer_config(LMCACHE)["kv_connector_extra_config"]
    assert extra == {"lmcache.mp.host": "tcp://node.local", "lmcache.mp.port": 5555}
    assert store_environment(LMCACHE) == {}


def test_mooncake_gets_its_file_and_stores_what_turns_generate() -> None:
    assert store_environment(MOONCAKE) == {"MOONCAKE_CONFIG_PATH": "/etc/mooncake.json"}
    where = inspect.getmodule(worker.MooncakeStoreConfig)
    assert where is not None and "MOONCAKE_CONFIG_PATH" in inspect.getsource(where)
    assert 'get("save_decode_cache"' in inspect.getsource(connector)
    assert store_transfer_config(MOONCAKE)["kv_connector_extra_config"] == {"save_decode_cache": True}


def test_a_store_takes_the_place_of_the_host_tier() -> None:
    config = CaesuraConfig(replicas=ReplicaConfig(accelerator="gpu", kv_store=MOONCAKE))
    assert engine_kwargs(config)["kv_transfer_config"] == store_transfer_config(MOONCAKE)


@pytest.mark.parametrize("store", [LMCACHE, MOONCAKE], ids=["lmcache", "mooncake"])
def test_a_package_that_is_not_installed_is_named(store: KvStoreConfig) -> None:
    with pytest.raises(ConfigError, match=f"{store.name} needs the Python package"):
        check_installed(store_transfer_config(store)["kv_connector"])


def test_a_model_in_lmcache_sees_no_images(tmp_path: Path) -> None:
    """The tokens of two images are the same, and its keys have nothing else of them."""
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"depth": 1}}))

    def seeing(store: KvStoreConfig | None) -> frozenset[str]:
        replicas = {"accelerator": "gpu", "kv_store": store and store.model_dump()}
        model = {"id": "m", "source": str(tmp_path)}
        return seeing_models(CaesuraConfig.model_validate({"model": model, "replicas": replicas}))

    assert seeing(None) == seeing(MOONCAKE) == {"m"}
    assert not seeing(LMCACHE)


class NoEngine:
    """An engine that no update may reach."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


async def test_a_replica_with_a_store_loads_no_other_weights(tmp_path: Path) -> None:
    """Redis may have them from a deployment without a store."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, content in ((own, "1"), (other, "2")):
        folder.mkdir()
        (folder / "config.json").write_text(content)
    failed: list[bool] = []
    weights = ReplicaWeights(str(own), 60.0, lambda: failed.append(True), kv_store="lmcache")
    weights.open(NoEngine(), NoEngine(), NoEngine())  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"replicas\.kv_store.*lmcache"):
        weights.check(str(other))
    with pytest.raises(UpstreamFailed, match=r"replicas\.kv_store.*lmcache"):
        await weights.follow(WeightsTarget("step-1", str(other)))
    assert failed
