"""KV stores of other projects, LMCache and Mooncake, as vLLM's connectors.

They take the place of the host tier and of the disk tier. A store keeps the KV of all turns and knows no programs, so
that nothing is swapped or fetched ahead. Both have the tenant's salt in their keys: LMCache's server gets the salt with
each request, and Mooncake's keys are vLLM's block hashes.

LMCache's keys have only the name of the model, the tokens and the salt. Therefore a model in LMCache has no adapters
and reads no images, and a model in either store keeps its weights: Mooncake's connector copies KV in threads of its
own, which an update of the weights cannot wait for.
"""

from importlib.util import find_spec
from typing import Any

from cluster.config.models import KvStoreConfig
from cluster.core.errors import ConfigError

PACKAGES = {"lmcache": "lmcache", "mooncake": "mooncake"}
"""The Python package that each store's connector imports."""
CONNECTORS = {"lmcache": "LMCacheMPConnector", "mooncake": "MooncakeStoreConnector"}
"""vLLM's names of the connectors. LMCache's in-process connector (LMCacheConnectorV1) ignores the salt."""


def store_transfer_config(store: KvStoreConfig) -> dict[str, Any]:
    """Return the value of vLLM's engine argument ``kv_transfer_config``."""
    if store.name == "lmcache":
        assert store.address is not None, "the configuration was validated"
        host, _, port = store.address.rpartition(":")
        extra: dict[str, Any] = {"lmcache.mp.host": f"tcp://{host}", "lmcache.mp.port": int(port)}
    else:
        # What a turn generated is in the next turn's prompt.
        extra = {"save_decode_cache": True}
    return {"kv_connector": CONNECTORS[store.name], "kv_role": "kv_both", "kv_connector_extra_config": extra}


def store_environment(store: KvStoreConfig | None) -> dict[str, str]:
    """Return the environment variables that the store's connector reads."""
    return {"MOONCAKE_CONFIG_PATH": store.config_file} if store is not None and store.config_file is not None else {}


def check_installed(connector: str) -> None:
    """Raise ConfigError if the package of a store's connector is not installed where the replica runs."""
    for name, package in PACKAGES.items():
        if connector == CONNECTORS[name] and find_spec(package) is None:
            raise ConfigError(f"replicas.kv_store.name: {name} needs the Python package {package} on each replica")
