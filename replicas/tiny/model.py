"""The built-in model: a small random Llama with a trained tokenizer, so that everything runs without a model hub.

It says nothing sensible, but it is a model like any other: Hugging Face files, a byte-level BPE tokenizer trained on
the text beside this module, a chat template whose tool calls vLLM's `hermes` parser reads. Its replies have the word
frequencies of that text and end by themselves after some hundred tokens.
"""

import hashlib
import json
import math
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.core.errors import ConfigError

CONTEXT_TOKENS = 32_768
VOCABULARY = 2_048
"""Tokens: the special ones, 256 bytes, and merges learnt from the corpus."""

HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
"""The smallest that vLLM's CPU attention takes."""
FEED_FORWARD = 192
ROPE_THETA = 500_000.0

START = "<|im_start|>"
END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
"""In the order of their ids, from 0."""

REPLY_TOKENS = 256
"""One token in so many is given to the end of a reply; the random weights blur it."""
BLANK_SHARE = 1e-3
"""Factor on the frequency of tokens that are only white space: where JSON may have some, a random model would write
little else, and its tool calls would not end."""
SHARPNESS = 2.0
"""Gain of queries, keys and outputs over unit variance; with 1, greedy decoding soon repeats a few tokens."""

_HERE = Path(__file__).parent
_CORPUS = ("prose.txt", "code.txt", "transcripts.txt")
_TEMPLATE = "chat_template.jinja"
_MARK = "caesura_tiny_seed"
"""The key of `config.json` by which a directory is known as one of ours."""

_Weights = dict[str, npt.NDArray[np.float32]]


def write_tiny_model(directory: Path, seed: int = 0) -> None:
    """Write the model into ``directory``: the same bytes for the same ``seed``.

    The files appear together or not at all. A tiny model that is there already is replaced.

    Raises:
        ConfigError: ``directory`` is a file, or holds something that is not a tiny model; nothing was changed.
    """
    directory = directory.resolve()
    occupied = directory.is_file() or (directory.is_dir() and any(directory.iterdir()))
    if occupied and not _is_tiny_model(directory):
        raise ConfigError(f"{directory} is not empty and not a tiny model: choose another directory")
    with _built_beside(directory, seed) as built:
        if occupied:
            replaced = directory.with_name(f"{built.name}.old")
            directory.rename(replaced)
            built.rename(directory)
            shutil.rmtree(replaced)
        else:
            built.rename(directory)


def tiny_model_directory() -> Path:
    """Where this version's tiny model (seed 0) is: made on first use, under ``$CAESURA_CACHE`` or ``~/.cache/caesura``.

    Callers in several processes may ask at once: the first one to finish provides the files for all.
    """
    cache = Path(os.environ.get("CAESURA_CACHE") or Path.home() / ".cache" / "caesura")
    directory = cache / f"tiny-{_inputs_hash()}"
    if not _is_tiny_model(directory):
        with _built_beside(directory, seed=0) as built:
            try:
                built.rename(directory)
            except OSError:  # A directory that is not empty is not renamed over: somebody else was first.
                if not _is_tiny_model(directory):
                    raise
    return directory


@contextmanager
def _built_beside(directory: Path, seed: int) -> Iterator[Path]:
    """A complete model in a temporary sibling of ``directory``, which is removed unless it was renamed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    built = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    built.mkdir()
    try:
        _write_files(built, seed)
        yield built
    finally:
        shutil.rmtree(built, ignore_errors=True)


def _write_files(directory: Path, seed: int) -> None:
    corpus = [(_HERE / name).read_text(encoding="utf-8") for name in _CORPUS]
    tokenizer = _train_tokenizer(corpus)
    tokenizer.save(str(directory / "tokenizer.json"))
    shutil.copyfile(_HERE / _TEMPLATE, directory / _TEMPLATE)
    for name, content in _settings(seed).items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = _weights(np.random.default_rng(seed), _log_frequencies(tokenizer, corpus))
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def _is_tiny_model(directory: Path) -> bool:
    try:
        return _MARK in json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _inputs_hash() -> str:
    digest = hashlib.sha256()
    for path in (Path(__file__), _HERE / _TEMPLATE, *(_HERE / name for name in _CORPUS)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _train_tokenizer(corpus: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that numbers of any size are made of the same ten tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY:
        raise ValueError(f"the corpus is too short: {size} tokens learnt of {VOCABULARY}")
    return tokenizer


def _log_frequencies(tokenizer: Tokenizer, corpus: list[str]) -> npt.NDArray[np.float32]:
    """Natural logarithm of each token's frequency, shape [VOCABULARY]: smoothed counts, a share for the end token."""
    counts = Counter(token for text in corpus for token in tokenizer.encode(text).ids)
    smoothed = np.array([counts[token] + 0.5 for token in range(VOCABULARY)], np.float32)
    smoothed[[SPECIAL_TOKENS.index(START), SPECIAL_TOKENS.index(END_OF_TEXT)]] = 0.01
    smoothed[SPECIAL_TOKENS.index(END)] = smoothed.sum() / REPLY_TOKENS
    blank = [token for token in range(VOCABULARY) if (text := tokenizer.decode([token])) and not text.strip()]
    smoothed[blank] *= BLANK_SHARE
    frequencies: npt.NDArray[np.float32] = np.log(smoothed / smoothed.sum())
    return frequencies


def _weights(random: np.random.Generator, log_frequencies: npt.NDArray[np.float32]) -> _Weights:
    """Random weights that keep activations near one.

    Channel 0 of the residual stream is the same for every token and no layer writes to it, so that its column of the
    output layer acts as a bias: the log frequencies, as no Llama has one.
    """

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * (gain / math.sqrt(columns))).astype(np.float32)

    def residual(columns: int) -> npt.NDArray[np.float32]:
        weight = matrix(HIDDEN, columns)
        weight[0] = 0.0
        return weight

    ones = np.ones(HIDDEN, np.float32)
    embedding = random.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    embedding[:, 0] = 1.0
    output = matrix(VOCABULARY, HIDDEN, SHARPNESS)
    output[:, 0] = log_frequencies
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones, "lm_head.weight": output}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": residual(HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": residual(FEED_FORWARD),
        }
    return weights


def _settings(seed: int) -> dict[str, dict[str, Any]]:
    """The JSON files beside the weights and the tokenizer."""
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    config = {
        _MARK: seed,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "pad_token_id": ids[END_OF_TEXT],
    }
    generation = {"eos_token_id": [ids[END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
    }
    return {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer}
