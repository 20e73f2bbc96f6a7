"""How the model `encoder` is learnt: by cross entropy over bins, bounded in turns and passes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from cluster.errors import ConfigError
from predictor_service.distribution import LENGTH_EDGES, bin_of
from predictor_service.encoder import (
    HEADS,
    EncoderModel,
    EncoderSettings,
    from_files,
    load_tokenizer,
    padded,
    token_ids,
)
from predictor_service.encoder_network import EncoderNetwork
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.network import TURN_COUNT_EDGES
from predictor_service.network_training import one_core
from predictor_service.split import in_test

MOST_TURNS = 12_000
"""To learn from, drawn from all."""
LEAST_TURNS = 20
PASSES, LEAST_STEPS, MOST_PASSES = 4, 600, 24
"""Of few turns more passes."""
BATCH = 32
HEAD_LEARNING_RATE, TUNING_LEARNING_RATE, NEW_LEARNING_RATE = 1e-3, 5e-5, 1e-3
HELD_OUT_SHARE = 0.15
"""Of the groups: the pass that forecasts them best is kept."""
HELD_OUT_SEED = 7919

VOCABULARY, HIDDEN, LAYERS, ATTENTION_HEADS = 4096, 64, 2, 2
"""Of an encoder that is learnt from nothing."""


def fit_encoder(programs: Sequence[ProgramExample], settings: EncoderSettings) -> EncoderModel:
    """See `EncoderModel.fit`."""
    chosen = _drawn(programs, settings.seed)
    fit = [turn for group, turn in chosen if not in_test(group, HELD_OUT_SEED, HELD_OUT_SHARE)]
    held_out = [turn for group, turn in chosen if in_test(group, HELD_OUT_SEED, HELD_OUT_SHARE)]
    if len(fit) < LEAST_TURNS or not held_out:
        raise ConfigError(
            f"too little to learn from: {len(fit)} turns and {len(held_out)} to stop by; the model encoder needs "
            f"{LEAST_TURNS} and one, of several groups"
        )
    with one_core(settings.seed):
        if settings.path is None:
            tokenizer = _new_tokenizer([turn.context.text for turn in fit])
            encoder = _new_encoder(len(tokenizer), tokenizer.pad_token_id, settings)
        else:
            with from_files(Path(settings.path)):
                tokenizer = load_tokenizer(Path(settings.path))
                encoder = _encoder(Path(settings.path))
        network = EncoderNetwork(encoder, HEADS, settings.pooling)
        _train(network, settings, _Texts(fit, tokenizer, settings), _Texts(held_out, tokenizer, settings))
    return EncoderModel(settings, tokenizer, network)


class _Texts:
    """Turns as ids and target bins."""

    def __init__(self, turns: Sequence[TurnExample], tokenizer: Any, settings: EncoderSettings) -> None:
        self.ids = token_ids(tokenizer, [turn.context.text for turn in turns], settings.max_tokens)
        self.pad = tokenizer.pad_token_id
        lengths = np.array([turn.outcome.output_tokens for turn in turns], dtype=np.float64)
        remaining = np.array([turn.remaining for turn in turns], dtype=np.float64)
        self.bins = torch.from_numpy(
            np.stack(
                [
                    bin_of(LENGTH_EDGES, lengths),
                    bin_of(LENGTH_EDGES, remaining[:, 0]),
                    bin_of(TURN_COUNT_EDGES, remaining[:, 1]),
                ],
                axis=1,
            )
        )

    def batches(self, order: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Ids, mask and bins; texts of like lengths together, so that little is filled up."""
        blocks = [order[start : start + 32 * BATCH] for start in range(0, len(order), 32 * BATCH)]
        for block in blocks:
            by_length = sorted(block.tolist(), key=lambda index: len(self.ids[index]))
            parts = [by_length[start : start + BATCH] for start in range(0, len(by_length), BATCH)]
            for part in parts:
                ids, mask = padded([self.ids[index] for index in part], self.pad)
                yield ids, mask, self.bins[part]


def _train(network: nn.Module, settings: EncoderSettings, fit: _Texts, held_out: _Texts) -> None:
    """Leaves the network as it was after its best pass."""
    new = settings.path is None
    tuned = new or settings.tune
    network.encoder.requires_grad_(tuned)
    heads = [*network.norm.parameters(), *network.heads.parameters()]
    groups = [{"params": heads, "lr": HEAD_LEARNING_RATE}]
    if tuned:
        groups.append(
            {"params": network.encoder.parameters(), "lr": NEW_LEARNING_RATE if new else TUNING_LEARNING_RATE}
        )
    optimiser = torch.optim.AdamW(groups, weight_decay=1e-2)
    passes = min(MOST_PASSES, max(PASSES, LEAST_STEPS * BATCH // len(fit.ids)))
    steps = passes * (len(fit.ids) // BATCH + len(fit.ids) // (32 * BATCH) + 2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, [group["lr"] for group in groups], total_steps=steps, pct_start=0.15
    )
    generator = np.random.default_rng(settings.seed)
    best_loss, best = np.inf, network.state_dict()
    for _ in range(passes):
        network.train(tuned)
        for ids, mask, bins in fit.batches(generator.permutation(len(fit.ids))):
            optimiser.zero_grad()
            _loss(network(ids, mask), bins).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            order = np.arange(len(held_out.ids))
            losses = [
                (len(bins), float(_loss(network(ids, mask), bins))) for ids, mask, bins in held_out.batches(order)
            ]
        loss = sum(size * part for size, part in losses) / len(order)
        if loss < best_loss:
            best_loss, best = loss, {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(best)
    network.requires_grad_(False)


def _loss(logits: Tensor, bins: Tensor) -> Tensor:
    total = torch.zeros(())
    start = 0
    for number, head in enumerate(HEADS):
        total = total + nn.functional.cross_entropy(logits[:, start : start + head.bins], bins[:, number])
        start += head.bins
    return total


def _drawn(programs: Sequence[ProgramExample], seed: int) -> list[tuple[str, TurnExample]]:
    """Turns with a text, each with its group; if none has any, all."""
    turns = [(program.split_group, turn) for program in programs for turn in program.turns]
    turns = [(group, turn) for group, turn in turns if turn.context.text] or turns
    order = np.random.default_rng(seed).permutation(len(turns))[:MOST_TURNS]
    return [turns[int(index)] for index in order]


def _new_tokenizer(texts: Sequence[str]) -> Any:
    """Byte-level pairs, so that nothing is unknown."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["[PAD]", "[CLS]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.encode("utf-8", "replace").decode() for text in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", truncation_side="left"
    )


def _new_encoder(vocabulary: int, pad: int, settings: EncoderSettings) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=ATTENTION_HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=settings.max_tokens,
        pad_token_id=pad,
    )
    encoder: nn.Module = BertModel(config, add_pooling_layer=True)
    return encoder


def _encoder(path: Path) -> nn.Module:
    """Only from safetensors: other weights are programs."""
    from transformers import AutoModel

    encoder: nn.Module = AutoModel.from_pretrained(str(path), local_files_only=True, use_safetensors=True)
    return encoder.float()
