"""Networks of Hugging Face: reads checkpoints and bundles, makes token ids of texts, and trains on one core."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from cluster.core.errors import ConfigError
from predictor_service.bundle import Bundle
from predictor_service.examples import ProgramExample, TurnExample, in_test

MOST_CHARACTERS_A_TOKEN = 8
"""Characters per token to which a text is cut before the tokenizer cuts it to the largest number of tokens."""
MOST_TURNS, LEAST_TURNS = 12_000, 20
"""Turns to train on, at most and at least. Of more turns, `MOST_TURNS` are drawn at random."""
BATCH = 32
HELD_OUT_SHARE, HELD_OUT_SEED = 0.15, 7919
"""Share and seed of the held-out groups. The weights of the pass that forecasts these groups best are kept."""
PASSES, LEAST_STEPS, MOST_PASSES = 4, 600, 24
"""Least number of passes, least number of steps, and largest number of passes. Few turns get more passes."""

CAUSAL, ENCODER = "a causal language model, such as OPT-125M", "a text encoder, such as BERT"
"""The kinds of a base, in words for a message."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


# --- the base ---


def check_base(base: Path, model: str, kind: str | None = None) -> None:
    """Check that a directory contains a checkpoint with weights and a tokenizer.

    Args:
        base: the directory.
        model: the name of the model that is to be trained.
        kind: `CAUSAL` or `ENCODER`; None accepts both.

    Raises:
        ConfigError: a part is missing, or the checkpoint is of the wrong kind; the message names the option.
    """
    where = f"--base {base}"
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"{where}: has no config.json; give a directory of Hugging Face with config, safetensors and tokenizer"
        )
    if not any(base.glob("*.safetensors")):
        raise ConfigError(
            f"{where}: has no weights in safetensors; other formats are not read, because they can contain programs"
        )
    if not any((base / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"{where}: has no tokenizer (one of: {', '.join(_TOKENIZERS)})")
    if kind is None:
        return
    try:
        found = json.loads((base / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: config.json cannot be read: {error}") from error
    if _kind(found) != kind:
        raise ConfigError(f"{where}: is of the type {found!r}, but the model {model} reads {kind}")


def _kind(model_type: object) -> str | None:
    # Encoders such as BERT can be used as causal models, too, but no causal model as an encoder.
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return ENCODER
    return CAUSAL if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn Hugging Face's errors about files into a ConfigError that begins with ``where``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: no network with a tokenizer can be read from it: {error}") from error


def read_tokenizer(path: Path) -> Any:
    """Read the tokenizer of a directory. It keeps the end of a long text.

    Raises:
        ValueError: the tokenizer has no token to fill up with.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    tokenizer.truncation_side = "left"
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ValueError("its tokenizer has no token to fill up with")
    return tokenizer


# --- bundles ---


def saved_files(tokenizer: Any, config: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer and of a network's configuration, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def loaded(bundle: Bundle, directory: Path, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the tokenizer and the network of a bundle.

    Args:
        bundle: its content.
        directory: where it is, for messages.
        make: makes the network of a configuration. Its weights are those of the bundle afterwards.

    Raises:
        ConfigError: a file cannot be read.
        ValueError: a weight is not finite, or the weights are those of another network.
    """
    for name, array in bundle.tensors.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: has values that are not finite")
    with tempfile.TemporaryDirectory() as folder, reading(str(directory)):
        for name, content in bundle.parts.items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = read_tokenizer(Path(folder))
        network = make(AutoConfig.from_pretrained(folder, local_files_only=True))
    try:
        network.load_state_dict({name: torch.from_numpy(array) for name, array in bundle.tensors.items()})
    except RuntimeError as error:
        raise ValueError(f"{error}") from error
    return tokenizer, network


# --- tokens ---


def bound(tokenizer: Any, config: Any, most_tokens: int) -> None:
    """Limit the tokens of a text to ``most_tokens`` and to the network's positions."""
    positions = getattr(config, "max_position_embeddings", None) or most_tokens
    tokenizer.model_max_length = min(most_tokens, positions, tokenizer.model_max_length)


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, at least one."""
    most = MOST_CHARACTERS_A_TOKEN * tokenizer.model_max_length
    plain = [text[-most:].encode("utf-8", "replace").decode("utf-8") for text in texts]
    ids = tokenizer(plain, truncation=True, padding=False)["input_ids"]
    return [row or [tokenizer.pad_token_id] for row in ids]


# --- examples ---


def divided(
    programs: Sequence[ProgramExample], seed: int, model: str
) -> tuple[Sequence[TurnExample], Sequence[TurnExample]]:
    """Draw turns that have a text (if no turn has one, any turns), and hold out those of some groups.

    Raises:
        ConfigError: these are too few.
    """
    turns = [(program.split_group, turn) for program in programs for turn in program.turns]
    turns = [(group, turn) for group, turn in turns if turn.context.text] or turns
    order = np.random.default_rng(seed).permutation(len(turns))[:MOST_TURNS]
    sides: tuple[list[TurnExample], list[TurnExample]] = ([], [])
    for group, turn in (turns[int(index)] for index in order):
        sides[in_test(group, HELD_OUT_SEED, HELD_OUT_SHARE)].append(turn)
    if len(sides[0]) < LEAST_TURNS or not sides[1]:
        raise ConfigError(
            f"too little to learn from: {len(sides[0])} turns and {len(sides[1])} to stop by; the model {model} needs "
            f"{LEAST_TURNS} and one, of several groups"
        )
    return sides


# --- training ---


@contextmanager
def one_core(seed: int) -> Iterator[None]:
    """Run Torch on one core, to leave the others to other work. The same seed gives the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def batches(order: NDArray[np.int64]) -> list[list[int]]:
    """Return the row numbers of ``order`` in batches."""
    return [order[at : at + BATCH].tolist() for at in range(0, len(order), BATCH)]


def train_passes(
    module: Any,
    groups: Sequence[dict[str, Any]],
    losses: tuple[Callable[[Sequence[int]], Any], Callable[[Sequence[int]], Any]],
    counts: tuple[int, int],
    generator: np.random.Generator,
) -> None:
    """Train a module in place. It ends with the weights of its best pass on the held-out rows, and frozen.

    Args:
        module: a Torch module.
        groups: parameters with their largest learning rate ``lr``.
        losses: the mean loss of some rows to train on, and of some held-out rows.
        counts: the numbers of these rows.
        generator: draws the order of the rows.

    Raises:
        ConfigError: the loss on the held-out rows is not a finite number after any pass.
    """
    optimiser = torch.optim.AdamW(groups, weight_decay=1e-2)
    weights = [weight for group in groups for weight in group["params"]]
    passes = min(MOST_PASSES, max(PASSES, LEAST_STEPS * BATCH // counts[0]))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, [group["lr"] for group in groups], total_steps=passes * -(-counts[0] // BATCH), pct_start=0.15
    )
    best_loss, best = np.inf, None
    for _ in range(passes):
        module.train()
        for rows in batches(generator.permutation(counts[0])):
            optimiser.zero_grad()
            losses[0](rows).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimiser.step()
            schedule.step()
        module.eval()
        with torch.no_grad():
            loss = sum(len(rows) * float(losses[1](rows)) for rows in batches(np.arange(counts[1])))
        if loss < best_loss:
            best_loss, best = loss, {name: one.clone() for name, one in module.state_dict().items()}
    if best is None:
        raise ConfigError("training failed: no pass has a finite loss on the held-out turns")
    module.load_state_dict(best)
    module.requires_grad_(False)
