"""The model `encoder`: a pretrained text encoder that classifies the prompt into bins of lengths and of remaining work.

The base can be any local checkpoint of Hugging Face's `AutoModelForSequenceClassification`. The model reads only text:
a turn without text gets the forecast of an empty text. `predictor_service.paper_encoders` has the papers' own models.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.distribution import LENGTH_EDGES, Distribution, Floats, bin_of
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.fine_tuning import (
    BATCH,
    bound,
    check_base,
    divided,
    loaded,
    one_core,
    read_tokenizer,
    reading,
    saved_files,
    token_ids,
    train_passes,
)
from predictor_service.model import Remaining, TurnContext

TURN_COUNT_EDGES: Floats = np.concatenate([np.arange(9) - 0.5, np.round(np.geomspace(9, 512, 18)) - 0.5])
"""Edges of the bins of remaining turns: one bin for each number up to 7, then bins of about equal ratios."""
BINS = (len(LENGTH_EDGES) - 1, len(LENGTH_EDGES) - 1, len(TURN_COUNT_EDGES) - 1)
"""Numbers of classes of the length, of the remaining tokens and of the remaining turns."""
INPUT_VERSION = 2
"""Stands for the version of the features. Raise it when the tokens of a text or the classes change."""
MOST_TOKENS = 512
"""Tokens of a text that are read: the last ones, and no more than the base has positions for."""
BASE_LEARNING_RATE, HEAD_LEARNING_RATE = 5e-5, 1e-3

_MODEL = "encoder"
_TURN_MIDDLES: Floats = (TURN_COUNT_EDGES[:-1] + TURN_COUNT_EDGES[1:]) / 2


class EncoderModel:
    """Predicts lengths and remaining work from text.

    Args:
        tokenizer: a tokenizer of Hugging Face.
        network: a sequence classifier of Hugging Face. It is never changed.
    """

    def __init__(self, tokenizer: Any, network: Any) -> None:
        self.tokenizer = tokenizer
        self.network = network.eval()

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[0]

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[1]

    def lengths_and_remaining(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        """Predict both for each turn in one computation."""
        if not turns:
            return [], []
        ids = token_ids(self.tokenizer, [turn.text for turn in turns])
        with torch.no_grad():
            parts = [_logits(self.network, self.tokenizer, ids[at : at + BATCH]) for at in range(0, len(ids), BATCH)]
        shares = [torch.softmax(one.double(), dim=1).numpy() for one in torch.cat(parts).split(BINS, dim=1)]
        counts = np.maximum(shares[2] @ _TURN_MIDDLES, 0.0)
        remaining = [
            Remaining(Distribution(LENGTH_EDGES, row), float(count))
            for row, count in zip(shares[1], counts, strict=True)
        ]
        return [Distribution(LENGTH_EDGES, row) for row in shares[0]], remaining

    @classmethod
    def fit(cls, programs: Sequence[ProgramExample], base: Path, seed: int = 0) -> "EncoderModel":
        """Fine-tune the checkpoint in ``base`` on ``programs``, on one core.

        Raises:
            ConfigError: there is no such checkpoint, or too little data.
        """
        sides = divided(programs, seed, _MODEL)
        check_base(base, _MODEL)
        with one_core(seed), reading(f"--base {base}"):
            tokenizer = read_tokenizer(base)
            # Weights in other formats than safetensors can contain programs.
            network = AutoModelForSequenceClassification.from_pretrained(
                str(base), num_labels=sum(BINS), local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
            network.config.pad_token_id = tokenizer.pad_token_id
            bound(tokenizer, network.config, MOST_TOKENS)
            _train(network, tokenizer, sides, np.random.default_rng(seed))
        return cls(tokenizer, network)

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle with the network and its tokenizer.

        Raises:
            ConfigError: it cannot be written.
        """
        tensors = {name: tensor.numpy() for name, tensor in self.network.state_dict().items()}
        parts = saved_files(self.tokenizer, self.network.config)
        write_bundle(directory, Bundle(_MODEL, INPUT_VERSION, origin or Origin(), tensors, parts))

    @classmethod
    def load(cls, directory: Path) -> "EncoderModel":
        """Read a bundle that `save` wrote.

        Raises:
            ConfigError: it is no complete bundle of this model and version; the message names the file and the field.
        """
        bundle = read_bundle(directory, _MODEL, INPUT_VERSION)
        make = partial(AutoModelForSequenceClassification.from_config, dtype=torch.float32)
        with bundle.reading(directory):
            return cls(*loaded(bundle, directory, make))


def _logits(network: Any, tokenizer: Any, ids: Sequence[Sequence[int]]) -> Any:
    """Return the logits of all classes, shape [texts, sum of `BINS`]."""
    inputs = tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt")
    return network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def _classes(turns: Sequence[TurnExample]) -> Any:
    """Return the true classes of turns, shape [turns, 3]."""
    lengths = np.array([turn.outcome.output_tokens for turn in turns], dtype=np.float64)
    remaining = np.array([turn.remaining for turn in turns], dtype=np.float64)
    columns = (
        bin_of(LENGTH_EDGES, lengths),
        bin_of(LENGTH_EDGES, remaining[:, 0]),
        bin_of(TURN_COUNT_EDGES, remaining[:, 1]),
    )
    return torch.from_numpy(np.stack(columns, axis=1))


def _train(
    network: Any,
    tokenizer: Any,
    sides: tuple[Sequence[TurnExample], Sequence[TurnExample]],
    generator: np.random.Generator,
) -> None:
    """Train the network in place on the first side. It ends with the weights of its best pass on the second."""

    def of(side: Sequence[TurnExample]) -> Callable[[Sequence[int]], Any]:
        ids, classes = token_ids(tokenizer, [turn.context.text for turn in side]), _classes(side)
        return lambda rows: _loss(_logits(network, tokenizer, [ids[row] for row in rows]), classes[rows])

    base = {id(weight) for weight in network.base_model.parameters()}
    groups = [
        {"params": [w for w in network.parameters() if id(w) in base], "lr": BASE_LEARNING_RATE},
        {"params": [w for w in network.parameters() if id(w) not in base], "lr": HEAD_LEARNING_RATE},
    ]
    train_passes(network, groups, (of(sides[0]), of(sides[1])), (len(sides[0]), len(sides[1])), generator)


def _loss(logits: Any, classes: Any) -> Any:
    """Return the sum of the cross entropies of the three questions."""
    parts = logits.split(BINS, dim=1)
    return sum(torch.nn.functional.cross_entropy(part, classes[:, at]) for at, part in enumerate(parts))
