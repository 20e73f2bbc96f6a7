"""The model `encoder`, the papers' configuration: a text encoder's embedding of the prompt, classified into bins.

AugServe fine-tunes BERT on the prompt, LAMPS and MARS classify OPT-125M's embedding of the last token. Here it is any
encoder of Hugging Face's that is on this machine, with heads for lengths and for what comes after; without one a
small encoder is learnt from nothing. It sees the text alone: no text gets the forecast of an empty one.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from cluster.errors import ConfigError
from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.context import TurnContext
from predictor_service.distribution import LENGTH_EDGES, Distribution, Floats
from predictor_service.examples import ProgramExample
from predictor_service.model import Remaining
from predictor_service.network import TURN_COUNT_EDGES, Head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

LENGTH_BINS, TURN_COUNT_BINS = len(LENGTH_EDGES) - 1, len(TURN_COUNT_EDGES) - 1
HEADS = (Head("lengths", LENGTH_BINS), Head("remaining", LENGTH_BINS), Head("turns", TURN_COUNT_BINS))
INPUT_VERSION = 1
"""In the place of the features' version: how a text becomes tokens."""
MOST_CHARACTERS_A_TOKEN = 8
"""More of a text than this would be cut off anyway."""

_MODEL = "encoder"
_TURN_MIDDLES: Floats = (TURN_COUNT_EDGES[:-1] + TURN_COUNT_EDGES[1:]) / 2


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Which encoder, and how it is used."""

    path: str | None = None
    """A directory with an encoder's config, weights (safetensors) and tokenizer; None: a small one, from nothing."""
    pooling: Literal["mean", "last"] = "mean"
    """A text's embedding: the mean of its tokens' or that of its last token."""
    tune: bool = True
    """The encoder learns too; otherwise only the heads do. One from nothing always learns."""
    max_tokens: int = 128
    """Of a text, the last."""
    seed: int = 0


class EncoderModel:
    """Lengths and remaining work from text alone.

    Args:
        settings: as it was learnt.
        tokenizer: Hugging Face's, that of the encoder.
        network: an `EncoderNetwork`, which is asked and never changed.
    """

    def __init__(self, settings: EncoderSettings, tokenizer: Any, network: "nn.Module") -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.network = network.eval()

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[0]

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[1]

    def lengths_and_remaining(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        """Both answers at the price of one."""
        if not turns:
            return [], []
        shares = _shares(self._logits([turn.text for turn in turns]))
        counts = np.maximum(shares["turns"] @ _TURN_MIDDLES, 0.0)
        tokens = [Distribution(LENGTH_EDGES, row) for row in shares["remaining"]]
        remaining = [Remaining(answer, float(count)) for answer, count in zip(tokens, counts, strict=True)]
        return [Distribution(LENGTH_EDGES, row) for row in shares["lengths"]], remaining

    @classmethod
    def fit(cls, programs: Sequence[ProgramExample], settings: EncoderSettings | None = None) -> "EncoderModel":
        """Learnt from ``programs``, in a minute or two on one core.

        Raises:
            ConfigError: there is no such encoder, or too little to learn from.
        """
        from predictor_service.encoder_training import fit_encoder

        return fit_encoder(programs, settings or EncoderSettings())

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle, the encoder and its tokenizer in it.

        Raises:
            ConfigError: it cannot be written.
        """
        tensors = {name: tensor.numpy() for name, tensor in self.network.state_dict().items()}
        with tempfile.TemporaryDirectory() as beside:
            self.tokenizer.save_pretrained(beside)
            self.network.encoder.config.save_pretrained(beside)
            parts = {path.name: path.read_bytes() for path in Path(beside).iterdir() if path.is_file()}
        write_bundle(
            directory,
            Bundle(_MODEL, INPUT_VERSION, origin or Origin(), tensors, parts, asdict(self.settings)),
        )

    @classmethod
    def load(cls, directory: Path) -> "EncoderModel":
        """What `save` wrote.

        Raises:
            ConfigError: it is no whole bundle of this model and version; names file and field.
        """
        import torch

        from predictor_service.encoder_network import EncoderNetwork

        bundle = read_bundle(directory, _MODEL, INPUT_VERSION)
        try:
            settings = TypeAdapter(EncoderSettings).validate_python(bundle.settings)
        except ValidationError as error:
            raise ConfigError(f"{directory}: settings: {error}") from error
        with bundle.refused(directory):
            for name, array in bundle.tensors.items():
                if not np.isfinite(array).all():
                    raise ValueError(f"{name}: has values that are not finite")
            with tempfile.TemporaryDirectory() as beside:
                for name in bundle.parts:
                    (Path(beside) / name).write_bytes(bundle.part(name))
                with from_files(directory):
                    tokenizer, encoder = load_tokenizer(Path(beside)), encoder_of_config(Path(beside))
            network = EncoderNetwork(encoder, HEADS, settings.pooling)
            try:
                network.load_state_dict({name: torch.from_numpy(array) for name, array in bundle.tensors.items()})
            except RuntimeError as error:
                raise ValueError(f"{error}") from error
        return cls(settings, tokenizer, network)

    def _logits(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        ids = token_ids(self.tokenizer, texts, self.settings.max_tokens)
        with torch.no_grad():
            return np.concatenate(
                [
                    self.network(*padded(ids[start : start + 64], self.tokenizer.pad_token_id)).numpy()
                    for start in range(0, len(ids), 64)
                ]
            )


@contextmanager
def from_files(path: Path) -> "Iterator[None]":
    """Hugging Face's errors about files become ours, which name ``path``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: no encoder with a tokenizer can be read from it: {error}") from error


def load_tokenizer(path: Path) -> Any:
    """Of a directory; the end of a text is what is kept of it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ValueError("its tokenizer has no token to fill up with")
    return tokenizer


def encoder_of_config(path: Path) -> "nn.Module":
    """Of the shape that a directory's config says, with random weights."""
    from transformers import AutoConfig, AutoModel

    encoder: nn.Module = AutoModel.from_config(AutoConfig.from_pretrained(str(path), local_files_only=True))
    return encoder.float()


def token_ids(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Of each text at least one, at most so many."""
    plain = [text[-MOST_CHARACTERS_A_TOKEN * max_tokens :].encode("utf-8", "replace").decode("utf-8") for text in texts]
    ids = tokenizer(plain, truncation=True, max_length=max_tokens, padding=False)["input_ids"]
    return [row or [tokenizer.pad_token_id] for row in ids]


def padded(ids: Sequence[Sequence[int]], pad: int) -> tuple["Tensor", "Tensor"]:
    """Ids and mask, shapes [texts, tokens of the longest]."""
    import torch

    width = max(len(row) for row in ids)
    filled = torch.tensor([[*row, *[pad] * (width - len(row))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    return filled, mask


def _shares(logits: NDArray[np.float32]) -> dict[str, Floats]:
    shares: dict[str, Floats] = {}
    start = 0
    for head in HEADS:
        part = logits[:, start : start + head.bins].astype(np.float64)
        weights = np.exp(part - part.max(axis=1, keepdims=True))
        shares[head.name] = weights / weights.sum(axis=1, keepdims=True)
        start += head.bins
    return shares
