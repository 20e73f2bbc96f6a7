"""Which features are off for a model, by its Hugging Face configuration. Neither vLLM nor the weights are read.

`tests/models` compares the answers with what vLLM's engine does.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from cluster.config.models import TINY
from cluster.config.schema import CaesuraConfig

CONFIG = "config.json"

STATE_LAYERS = frozenset({"mamba", "mamba2", "linear_attention", "conv", "recurrent", "kda"})
"""Types of layers that keep a state instead of KV."""
WINDOW_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
"""Types of layers that keep the KV of the last tokens only."""
STATE_FIELDS = ("ssm_state_size", "state_size", "mamba_d_state", "mamba_d_ssm", "linear_num_key_heads")
"""Fields that only configurations with such a state have."""
STATE_DRAFTERS = ("eagle", "mtp", "dflash", "dspark")
"""Parts of the names of methods of speculative decoding that draft from the model's hidden states."""

VISION_FIELDS = ("vision_config", "vision_tower", "visual", "image_token_id", "image_token_index", "img_processor")
"""Fields that only configurations of models that see have."""


class Feature(StrEnum):
    """What can be off for a model."""

    KV_REUSE = "KV reuse"
    PARTIAL_CONTEXTS = "partial contexts"
    EARLY_PREFILL = "early prefill"
    """It is off with partial contexts, too."""


EFFECTS = {
    Feature.KV_REUSE: "no KV is held or offloaded in a pause, and each turn computes its whole prompt",
    Feature.PARTIAL_CONTEXTS: (
        "a hold is evicted as a whole, and tool outputs are not computed early; holds, offloading and prefetching work"
    ),
    Feature.EARLY_PREFILL: "tool outputs are not computed early; holds, offloading and prefetching work",
}
"""What a user sees where a feature is off."""


@dataclass(frozen=True, slots=True)
class Off:
    """A feature that is off for a model."""

    feature: Feature
    reason: str

    def __str__(self) -> str:
        return f"{self.feature} is off ({self.reason}): {EFFECTS[self.feature]}"


def config_of(source: str) -> Mapping[str, Any] | None:
    """Return the configuration of a model that is on this machine, or None: it is not, or it cannot be read.

    Args:
        source: a path or a Hugging Face id, as `model.source`.
    """
    path = Path(source) / CONFIG
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(source, CONFIG)
        except HFValidationError:
            return None
        if not isinstance(found, str):
            return None
        path = Path(found)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def sees_images(source: str) -> bool:
    """Return whether a model reads images, by its `config.json`. True: that is not on this machine.

    Args:
        source: a path or a Hugging Face id, as `model.source`.
    """
    if source == TINY:
        return False
    config = config_of(source)
    return config is None or any(config.get(name) for name in VISION_FIELDS)


def seeing_models(config: CaesuraConfig) -> frozenset[str]:
    """Return the names of the models that read images, with those of their adapters.

    A model whose KV store knows only tokens reads none: the tokens of all images are the same.
    """
    seeing = {
        model
        for model, own in config.served.items()
        if not (own.replicas.kv_store and own.replicas.kv_store.knows_only_tokens) and sees_images(own.model.source)
    }
    return frozenset(seeing | {name for name, model in config.adapters.items() if model in seeing})


def features_off(config: Mapping[str, Any], engine: Mapping[str, Any], accelerator: str) -> Iterator[Off]:
    """Yield the features that are off for a model.

    Args:
        config: the model's `config.json`.
        engine: the configured engine arguments.
        accelerator: `cpu` or `gpu`.
    """
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, dict) else config
    layers = set(_layers(fields))
    states = bool(layers & STATE_LAYERS) or any(fields.get(name) for name in STATE_FIELDS)
    nothing = _no_cache(
        fields, engine.get("enable_prefix_caching"), accelerator, only_states=states and not _attends(fields, layers)
    )
    if nothing is not None:
        yield Off(Feature.KV_REUSE, nothing)
        yield Off(Feature.PARTIAL_CONTEXTS, "nothing is reused")
    elif states:
        yield Off(Feature.PARTIAL_CONTEXTS, "the model has state-space layers")
    elif layers & WINDOW_LAYERS or _slides(fields):
        yield Off(Feature.PARTIAL_CONTEXTS, "the model has layers with a window")
    elif _drafts_from_states(engine.get("speculative_config")):
        yield Off(Feature.EARLY_PREFILL, "vLLM computes the last block of a reused context again for the drafter")


def _no_cache(fields: Mapping[str, Any], caching: Any, accelerator: str, *, only_states: bool) -> str | None:
    """Return why vLLM has no prefix cache for the model, or None: it has one."""
    if caching is False:
        return "engine.enable_prefix_caching is false"
    if accelerator == "cpu" and fields.get("kv_lora_rank"):
        return "vLLM has no prefix caching for MLA on CPUs without AMX"
    if only_states and not caching:
        return "vLLM caches no states by default; engine.enable_prefix_caching: true turns it on"
    return None


def _drafts_from_states(speculative: Any) -> bool:
    """Return whether the model's hidden states are drafted from. Without a method, vLLM goes by the drafter's name."""
    if not isinstance(speculative, Mapping):
        return False
    name = str(speculative.get("method") or speculative.get("model")).lower()
    return any(part in name for part in STATE_DRAFTERS)


def _layers(fields: Mapping[str, Any]) -> Iterator[str]:
    for name in ("layer_types", "layers_block_type"):
        types = fields.get(name)
        if isinstance(types, list):
            yield from (one for one in types if isinstance(one, str))


def _attends(fields: Mapping[str, Any], layers: set[str]) -> bool:
    """Return whether a model with states has attention, too."""
    return bool(fields.get("num_attention_heads")) and (not layers or bool(layers - STATE_LAYERS - {"mlp", "moe"}))


def _slides(fields: Mapping[str, Any]) -> bool:
    """Return whether all layers have a window, as nothing lists types of layers."""
    return (
        not fields.get("layer_types")
        and bool(fields.get("sliding_window") or fields.get("attention_chunk_size"))
        and fields.get("use_sliding_window") is not False
    )
