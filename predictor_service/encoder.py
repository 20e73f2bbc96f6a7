"""The model `encoder`, as in the papers: a pretrained text encoder that classifies the prompt into bins.

AugServe fine-tunes BERT on the prompt. LAMPS and MARS classify OPT-125M's embedding of the last token. The base can be
any local checkpoint of Hugging Face's `AutoModelForSequenceClassification`. The model reads only text: a turn without
text gets the forecast of an empty text.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from cluster.core.errors import ConfigError
from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.distribution import LENGTH_EDGES, Distribution, Floats, bin_of
from predictor_service.examples import ProgramExample, TurnExample, in_test
from predictor_service.model import Remaining, TurnContext

TURN_COUNT_EDGES: Floats = np.concatenate([np.arange(9) - 0.5, np.round(np.geomspace(9, 512, 18)) - 0.5])
"""Edges of the bins of remaining turns: one bin for each number up to 7, then bins of about equal ratios."""
BINS = (len(LENGTH_EDGES) - 1, len(LENGTH_EDGES) - 1, len(TURN_COUNT_EDGES) - 1)
"""Numbers of classes of the length, of the remaining tokens and of the remaining turns."""
INPUT_VERSION = 2
"""Stands for the version of the features. Raise it when the tokens of a text or the classes change."""
MOST_TOKENS = 512
"""Tokens of a text that are read: the last ones, and no more than the base has positions for."""
MOST_CHARACTERS_A_TOKEN = 8
"""Characters per token to which a text is cut before the tokenizer cuts it to `MOST_TOKENS`."""

MOST_TURNS, LEAST_TURNS = 12_000, 20
"""Turns to train on, at most and at least. Of more turns, `MOST_TURNS` are drawn at random."""
PASSES, LEAST_STEPS, MOST_PASSES = 4, 600, 24
"""Least number of passes, least number of steps, and largest number of passes. Few turns get more passes."""
BATCH = 32
BASE_LEARNING_RATE, HEAD_LEARNING_RATE = 5e-5, 1e-3
HELD_OUT_SHARE, HELD_OUT_SEED = 0.15, 7919
"""Share and seed of the held-out groups. The weights of the pass that forecasts these groups best are kept."""

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
        ids = _token_ids(self.tokenizer, [turn.text for turn in turns])
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
        chosen = _drawn(programs, seed)
        fit = [turn for group, turn in chosen if not in_test(group, HELD_OUT_SEED, HELD_OUT_SHARE)]
        held_out = [turn for group, turn in chosen if in_test(group, HELD_OUT_SEED, HELD_OUT_SHARE)]
        if len(fit) < LEAST_TURNS or not held_out:
            raise ConfigError(
                f"too little to learn from: {len(fit)} turns and {len(held_out)} to stop by; the model encoder needs "
                f"{LEAST_TURNS} and one, of several groups"
            )
        with _one_core(seed), _reading(base):
            tokenizer = _tokenizer(base)
            # Weights in other formats than safetensors can contain programs.
            network = AutoModelForSequenceClassification.from_pretrained(
                str(base), num_labels=sum(BINS), local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
            network.config.pad_token_id = tokenizer.pad_token_id
            _bound(tokenizer, network.config)
            _train(network, tokenizer, fit, held_out, np.random.default_rng(seed))
        return cls(tokenizer, network)

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle with the network and its tokenizer.

        Raises:
            ConfigError: it cannot be written.
        """
        tensors = {name: tensor.numpy() for name, tensor in self.network.state_dict().items()}
        with tempfile.TemporaryDirectory() as beside:
            self.tokenizer.save_pretrained(beside)
            self.network.config.save_pretrained(beside)
            parts = {path.name: path.read_bytes() for path in Path(beside).iterdir() if path.is_file()}
        write_bundle(directory, Bundle(_MODEL, INPUT_VERSION, origin or Origin(), tensors, parts))

    @classmethod
    def load(cls, directory: Path) -> "EncoderModel":
        """Read a bundle that `save` wrote.

        Raises:
            ConfigError: it is no complete bundle of this model and version; the message names the file and the field.
        """
        bundle = read_bundle(directory, _MODEL, INPUT_VERSION)
        with bundle.reading(directory), tempfile.TemporaryDirectory() as beside:
            for name, array in bundle.tensors.items():
                if not np.isfinite(array).all():
                    raise ValueError(f"{name}: has values that are not finite")
            for name, content in bundle.parts.items():
                (Path(beside) / name).write_bytes(content)
            with _reading(directory):
                tokenizer = _tokenizer(Path(beside))
                config = AutoConfig.from_pretrained(beside, local_files_only=True)
                network = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
            try:
                network.load_state_dict({name: torch.from_numpy(array) for name, array in bundle.tensors.items()})
            except RuntimeError as error:
                raise ValueError(f"{error}") from error
        return cls(tokenizer, network)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn Hugging Face's errors about files into a ConfigError that names ``path``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no encoder with a tokenizer can be read from it: {error}") from error


@contextmanager
def _one_core(seed: int) -> Iterator[None]:
    """Run Torch on one core, to leave the others to other work. The same seed gives the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _tokenizer(path: Path) -> Any:
    """Read the tokenizer of a directory. It keeps the end of a long text."""
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    tokenizer.truncation_side = "left"
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ValueError("its tokenizer has no token to fill up with")
    return tokenizer


def _bound(tokenizer: Any, config: Any) -> None:
    """Limit the tokens of a text to the network's positions."""
    positions = getattr(config, "max_position_embeddings", None) or MOST_TOKENS
    tokenizer.model_max_length = min(MOST_TOKENS, positions, tokenizer.model_max_length)


def _token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, at least one."""
    most = MOST_CHARACTERS_A_TOKEN * tokenizer.model_max_length
    plain = [text[-most:].encode("utf-8", "replace").decode("utf-8") for text in texts]
    ids = tokenizer(plain, truncation=True, padding=False)["input_ids"]
    return [row or [tokenizer.pad_token_id] for row in ids]


def _logits(network: Any, tokenizer: Any, ids: Sequence[Sequence[int]]) -> Any:
    """Return the logits of all classes, shape [texts, sum of `BINS`]."""
    inputs = tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt")
    return network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def _drawn(programs: Sequence[ProgramExample], seed: int) -> list[tuple[str, TurnExample]]:
    """Draw turns that have a text, each with its group. If no turn has a text, draw from all turns."""
    turns = [(program.split_group, turn) for program in programs for turn in program.turns]
    turns = [(group, turn) for group, turn in turns if turn.context.text] or turns
    order = np.random.default_rng(seed).permutation(len(turns))[:MOST_TURNS]
    return [turns[int(index)] for index in order]


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
    fit: Sequence[TurnExample],
    held_out: Sequence[TurnExample],
    generator: np.random.Generator,
) -> None:
    """Train the network in place. It ends with the weights of its best pass on ``held_out``."""
    ids, classes = _token_ids(tokenizer, [turn.context.text for turn in fit]), _classes(fit)
    held_out_ids, held_out_classes = _token_ids(tokenizer, [turn.context.text for turn in held_out]), _classes(held_out)
    base = {id(weight) for weight in network.base_model.parameters()}
    groups = [
        {"params": [w for w in network.parameters() if id(w) in base], "lr": BASE_LEARNING_RATE},
        {"params": [w for w in network.parameters() if id(w) not in base], "lr": HEAD_LEARNING_RATE},
    ]
    optimiser = torch.optim.AdamW(groups, weight_decay=1e-2)
    passes = min(MOST_PASSES, max(PASSES, LEAST_STEPS * BATCH // len(ids)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, [group["lr"] for group in groups], total_steps=passes * -(-len(ids) // BATCH), pct_start=0.15
    )
    best_loss, best = np.inf, network.state_dict()
    for _ in range(passes):
        network.train()
        for rows in _batches(generator.permutation(len(ids))):
            optimiser.zero_grad()
            _loss(_logits(network, tokenizer, [ids[row] for row in rows]), classes[rows]).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            losses = [
                len(rows)
                * float(_loss(_logits(network, tokenizer, [held_out_ids[row] for row in rows]), held_out_classes[rows]))
                for rows in _batches(np.arange(len(held_out_ids)))
            ]
        if sum(losses) < best_loss:
            best_loss, best = sum(losses), {name: one.clone() for name, one in network.state_dict().items()}
    network.load_state_dict(best)
    network.requires_grad_(False)


def _batches(order: NDArray[np.int64]) -> list[list[int]]:
    return [order[at : at + BATCH].tolist() for at in range(0, len(order), BATCH)]


def _loss(logits: Any, classes: Any) -> Any:
    """Return the sum of the cross entropies of the three questions."""
    parts = logits.split(BINS, dim=1)
    return sum(torch.nn.functional.cross_entropy(part, classes[:, at]) for at, part in enumerate(parts))
