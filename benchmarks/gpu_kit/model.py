"""Models with random weights that the kit makes where it runs, so that it needs no model hub.

The model is of TinyLlama 1.1B's shape, in 16 bits, with the built-in model's tokenizer, so that it has a preset on each
GPU. Its greedy tokens depend on the whole context. A second folder has the same weights with sliding-window
attention in every other layer: two groups of KV blocks. A rehearsal uses small models of both kinds.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu_kit.task import Task
from replicas.tiny.model import SHARPNESS, tiny_model_directory

PRESET = "tinyllama-1.1b"
"""The model of `replicas.presets` that has this shape."""
WINDOW_TOKENS = 512
"""Sliding window of the second model, in tokens."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    dtype: str
    window: int

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


ONE_B = Sizes(22, 2048, 32, 4, 64, 5632, 32_000, "bfloat16", WINDOW_TOKENS)
SMALL = Sizes(4, 64, 4, 2, 32, 192, 2_048, "bfloat16", 128)


def sizes_of(task: Task) -> Sizes:
    """Return the sizes of the random model of a task."""
    return ONE_B if task.on_gpu else SMALL


def full_attention(task: Task) -> Path:
    """Return the folder of the model of a task: the caller's, or the random one, which is made on first use."""
    return task.model.resolve() if task.model else _made(task.cache, sizes_of(task), sliding=False)


def sliding_window(task: Task) -> Path:
    """Return the folder of the random model with sliding-window attention in every other layer."""
    return _made(task.cache, sizes_of(task), sliding=True)


def token_bytes(model: Path) -> int:
    """Return the bytes of one token's KV in 16 bits, by the model's config.json."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim)


def _made(cache: Path, sizes: Sizes, *, sliding: bool) -> Path:
    """Return the folder of a random model. Its files appear together or not at all."""
    digest = sha256(f"{sizes}{SEED}".encode() + Path(__file__).read_bytes()).hexdigest()[:12]
    directory = cache / f"llama-{digest}{'-sliding' if sliding else ''}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    plain = _made(cache, sizes, sliding=False) if sliding else None
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        if plain is None:
            save_file(dict(_weights(sizes)), built / "model.safetensors", metadata={"format": "pt"})
        else:
            os.link(plain / "model.safetensors", built / "model.safetensors")
        _write_texts(built, sizes, sliding=sliding)
        built.rename(directory)
    return directory


def _write_texts(directory: Path, sizes: Sizes, *, sliding: bool) -> None:
    tiny = tiny_model_directory()
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tiny / name, directory / name)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), sizes.vocabulary):
        vocabulary[f"unused{number}"] = number  # so that every token that the model generates has a text
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config: dict[str, Any] = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    config |= {
        "dtype": sizes.dtype,
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
    if sliding:
        kinds = ("full_attention", "sliding_attention")
        config |= {
            "sliding_window": sizes.window,
            "layer_types": [kinds[layer % 2] for layer in range(sizes.layers)],
        }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _weights(sizes: Sizes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights that keep activations near one, in the names of Hugging Face's Llama.

    The layers together add as much to the residual stream as the embedding has, whatever their number, so that the
    output depends on both. Queries, keys and outputs are sharper than unit variance, as in the built-in model.
    """
    random = torch.Generator().manual_seed(SEED)
    dtype = getattr(torch, sizes.dtype)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * (gain / math.sqrt(columns))).to(dtype)

    hidden, queries, keys = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    written = math.sqrt(2 / sizes.layers)
    ones = torch.ones(hidden, dtype=dtype)
    yield "model.embed_tokens.weight", matrix(sizes.vocabulary, hidden, math.sqrt(hidden))
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        yield f"{prefix}.self_attn.q_proj.weight", matrix(queries, hidden, SHARPNESS)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(keys, hidden, SHARPNESS)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, queries, written)
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}.mlp.gate_proj.weight", matrix(sizes.feed_forward, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(sizes.feed_forward, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, sizes.feed_forward, written)
    yield "model.norm.weight", ones.clone()
    yield "lm_head.weight", matrix(sizes.vocabulary, hidden, SHARPNESS)
