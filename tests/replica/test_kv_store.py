"""KV stores of other projects: what is rendered is what the installed vLLM's connectors read."""

import inspect

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector, worker

from cluster.app import engine_kwargs
from cluster.config.models import KvStoreConfig, ReplicaConfig
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError
from replicas.kv_store import check_installed, store_environment, store_transfer_config

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
