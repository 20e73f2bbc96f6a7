"""vLLM's own host tier (LRU, no programs) on any device, to compare with Caesura's under the same load."""

from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from replicas.host_tier import HostTierSpec, kv_transfer_config


class StockTierSpec(HostTierSpec):
    """vLLM's manager with the worker of the host tier, which is vLLM's own on CUDA."""

    def get_manager(self) -> OffloadingManager:
        """Return vLLM's manager, for the scheduler."""
        return CPUOffloadingSpec.get_manager(self)


def stock_config(tier_bytes: int) -> dict[str, Any]:
    """Return the value of vLLM's ``kv_transfer_config`` for a tier of so many bytes."""
    config = kv_transfer_config(tier_bytes)
    extra = config["kv_connector_extra_config"]
    extra |= {"spec_name": StockTierSpec.__name__, "spec_module_path": __name__}
    return config
