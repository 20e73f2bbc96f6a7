"""The identity of KV on disk: all that the bytes of a chunk depend on, beside the tokens in its key.

KV of one model is noise to another one. Two replicas may only read each other's files if they have the same weights,
the same type and layout of the KV cache, the same hashes, and the same software. The identity is the name of their
folder. It is computed where a replica starts.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
import vllm
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.file_mapper import FileMapper

from cluster.core.errors import ConfigError

FORMAT = 1
"""Version of the files' format."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Number and size of the parts of each file that are compared, beside those of its tensors."""
TENSORS = 1024
"""Largest number of tensors of a safetensors file of which a part is compared. Training changes all of a tensor, but
perhaps one kind of tensor only (merged adapters, frozen layers). Of more tensors, the digests of their names choose."""
HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, by its format."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def model_identity(config: Any) -> str:
    """Return a digest of a model and of the way in which its KV is computed.

    Args:
        config: vLLM's VllmConfig.

    Raises:
        ConfigError: two models could not be distinguished.
    """
    model, cache = config.model_config, config.cache_config
    if config.lora_config is not None:
        raise ConfigError(
            "replicas.disk_tier: it cannot be used with engine.enable_lora, since an adapter has only a name"
        )
    if cache.prefix_caching_hash_algo.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"replicas.disk_tier: engine.prefix_caching_hash_algo {cache.prefix_caching_hash_algo} hashes differently"
            " in each replica; use sha256, or set PYTHONHASHSEED"
        )
    parts = {
        "format": FORMAT,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": sys.version_info[:2],  # hashes are of pickled values
        "hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")],
        "weights": weights_identity(Path(model.model), getattr(model.hf_config, "_commit_hash", None)),
        "loaded": [str(config.load_config.load_format), model.seed, model.quantization],
        "types": [str(model.dtype), str(cache.cache_dtype)],
        "backend": str(getattr(config.attention_config, "backend", None)),
        "overrides": repr(model.hf_overrides),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def weights_identity(folder: Path, commit: str | None) -> str:
    """Return a digest of a model's weights.

    Args:
        folder: the model's folder, or its Hugging Face id.
        commit: the commit of a model that is on Hugging Face.

    Raises:
        ConfigError: it is no folder and has no commit.
    """
    if not folder.is_dir():
        if commit is None:
            raise ConfigError(
                f"replicas.disk_tier: {folder} is no folder and has no revision, so its KV has no identity"
            )
        return f"{folder}@{commit}"
    digest = hashlib.sha256()
    for file in sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)} | {*folder.glob("config.json")}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            places = [max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1) for sample in range(SAMPLES)]
            if file.suffix == ".safetensors":
                places += _tensors(content, size)
            for place in places:
                content.seek(place)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _tensors(content: BinaryIO, size: int) -> list[int]:
    """Return the places of the middles of a safetensors file's tensors. A file that is none has no places."""
    length = int.from_bytes(content.read(8), "little")
    if length > min(size, HEADER_BYTES):
        return []
    try:
        header = json.loads(content.read(length))
        ends = {name: header[name]["data_offsets"] for name in header if name != "__metadata__"}
        middles = {name: 8 + length + (int(begin) + int(end)) // 2 for name, (begin, end) in ends.items()}
    except (ValueError, TypeError, KeyError):
        return []
    chosen = sorted(middles, key=lambda name: hashlib.sha256(name.encode()).digest())[:TENSORS]
    return sorted(middles[name] for name in chosen)


def folder_name(spec: OffloadingSpec) -> str:
    """Return the name of the folder for KV like this spec's: its model's name and a digest.

    Args:
        spec: vLLM's spec, whose ``extra_config`` has the result of :func:`model_identity`.
    """
    mapper = FileMapper.from_offloading_spec("", spec)
    layout = [getattr(spec.config, "kv_cache_layout", None), spec.config.worker_kv_bytes_per_block, mapper.rank]
    parts = {**mapper.get_run_config(), "model_name": spec.extra_config["disk_identity"], "layout": layout}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    name = Path(spec.config.model.name).name or "model"
    return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)[:40]}-{digest}"
