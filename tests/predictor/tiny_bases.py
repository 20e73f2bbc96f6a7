"""Tiny checkpoints as they would be downloaded. Their weights are random, so their accuracy shows nothing."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast


def write_bert(directory: Path, words: Iterable[str], positions: int = 24) -> Path:
    """Write an encoder, which knows these words."""
    size = _write_tokenizer(directory, words)
    config = BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        pad_token_id=0,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _write(directory, lambda: BertModel(config))


def write_opt(directory: Path, words: Iterable[str], positions: int = 2048) -> Path:
    """Write a causal model, which knows these words."""
    size = _write_tokenizer(directory, words)
    config = OPTConfig(
        vocab_size=size,
        hidden_size=64,
        word_embed_proj_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=128,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        init_std=0.5,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return _write(directory, lambda: OPTForCausalLM(config))


def _write(directory: Path, make: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        make().save_pretrained(directory)
    return directory


def _write_tokenizer(directory: Path, words: Iterable[str]) -> int:
    known = ["[PAD]", "[CLS]", "[UNK]", *sorted(set(words))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    return len(known)
