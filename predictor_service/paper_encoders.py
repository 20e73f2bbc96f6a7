"""The models `lamps` and `augserve`: the papers' predictors, on a checkpoint of Hugging Face from the user's disk.

LAMPS (section 5) and MARS (appendix C.1) give the embedding of the prompt's last token of OPT-125M to a linear
classifier with 50 bins of 10 tokens, trained with the cross entropy. They take durations from the tool's history, and
so does Caesura: from its statistics.

AugServe (section 4.2) fine-tunes BERT-base-uncased on the prompt, which classifies the length into buckets, and
regresses the duration of the call from the prompt and the observed durations of the call's type. The paper does not
print the buckets (here: those of LAMPS), the loss of the durations (here: the squared error, by which the paper reports
them), or how the type enters (here: the regression is of the deviations from the type's mean).

Neither paper predicts the work that is left of a program. Both models read a turn's new text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModel

from cluster.core.errors import ConfigError
from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.call_times import CallTime, CallTimes
from predictor_service.distribution import (
    DURATION_EDGES,
    LENGTH_EDGES,
    TEN_TOKEN_BINS,
    Distribution,
    Floats,
    bin_of,
)
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.fine_tuning import (
    BATCH,
    CAUSAL,
    ENCODER,
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
from predictor_service.model import PauseContext, TurnContext

VERSION = 1
"""Stands for the version of the features. Raise it when the tokens of a text or the outputs change."""
BASE_LEARNING_RATE, HEAD_LEARNING_RATE = 5e-5, 1e-3
_TIMES = "call_times"
_ROWS = TypeAdapter(dict[str, CallTime])
Sides = tuple[Sequence[TurnExample], Sequence[TurnExample]]


class Network(torch.nn.Module):
    """A pretrained network, and a linear layer on its embedding of a text.

    Args:
        base: a network of Hugging Face that gives hidden states.
        outputs: number of outputs of the linear layer.
        causal: whether the embedding is that of the last token. Otherwise it is the one that the base pools, or that of
            the first token.
    """

    def __init__(self, base: Any, outputs: int, causal: bool) -> None:
        super().__init__()
        self.base = base
        self.causal = causal
        with torch.no_grad():
            width = self.embedded(torch.zeros((1, 1), dtype=torch.long), torch.ones((1, 1), dtype=torch.long)).shape[1]
        self.head = torch.nn.Linear(width, outputs)

    def embedded(self, ids: Any, mask: Any) -> Any:
        """Return the embedding of each text, shape [texts, width]."""
        found = self.base(input_ids=ids, attention_mask=mask)
        states = found.last_hidden_state
        if self.causal:
            return states[torch.arange(len(ids)), mask.sum(dim=1) - 1]
        pooled = getattr(found, "pooler_output", None)
        return states[:, 0] if pooled is None else pooled


class PaperEncoder(ABC):
    """What both models share: it predicts lengths from text.

    Args:
        tokenizer: a tokenizer of Hugging Face.
        network: it is never changed.
        times: observed durations by tool; None if the model predicts no durations.
    """

    NAME: ClassVar[str]
    KIND: ClassVar[str]
    MOST_TOKENS: ClassVar[int]
    """Tokens of a text that are read: the last ones, and no more than the base has positions for."""
    OUTPUTS: ClassVar[int] = TEN_TOKEN_BINS

    def __init__(self, tokenizer: Any, network: Network, times: CallTimes | None = None) -> None:
        self.tokenizer = tokenizer
        self.network = network.eval()
        self.times = times
        self._kept: dict[str, Any] = {}
        """The outputs of the texts of the last call, as durations are often asked after the lengths of the same."""

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`. The probabilities of 50 bins of 10 tokens; the last one stands for all longer turns."""
        if not turns:
            return []
        logits = torch.from_numpy(self._outputs(turns)[:, :TEN_TOKEN_BINS])
        shares = np.zeros((len(turns), len(LENGTH_EDGES) - 1))
        shares[:, :TEN_TOKEN_BINS] = torch.softmax(logits, dim=1).numpy()
        return [Distribution(LENGTH_EDGES, row) for row in shares]

    @classmethod
    def fit(cls, programs: Sequence[ProgramExample], base: Path, seed: int = 0) -> Self:
        """Train the model on ``programs`` with the checkpoint in ``base``, on one core.

        Raises:
            ConfigError: there is no such checkpoint, it is of the wrong kind, or there is too little data.
        """
        check_base(base, cls.NAME, cls.KIND)
        sides, times = divided(programs, seed, cls.NAME), cls._times(programs)
        with one_core(seed), reading(f"--base {base}"):
            tokenizer = read_tokenizer(base)
            # Weights in other formats than safetensors can contain programs.
            pretrained = AutoModel.from_pretrained(
                str(base), local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
            bound(tokenizer, pretrained.config, cls.MOST_TOKENS)
            network = Network(pretrained.eval(), cls.OUTPUTS, cls.KIND == CAUSAL)
            made = cls(tokenizer, network, times)
            made._train(sides, np.random.default_rng(seed))
        network.requires_grad_(False)
        return made

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle with the network and its tokenizer.

        Raises:
            ConfigError: it cannot be written.
        """
        tensors = {name: tensor.numpy() for name, tensor in self.network.state_dict().items()}
        parts = saved_files(self.tokenizer, self.network.base.config)
        settings = {} if self.times is None else {_TIMES: self.times.by_tool}
        write_bundle(directory, Bundle(self.NAME, VERSION, origin or Origin(), tensors, parts, settings))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a bundle that `save` wrote.

        Raises:
            ConfigError: it is no complete bundle of this model and version; the message names the file and the field.
        """
        bundle = read_bundle(directory, cls.NAME, VERSION)

        def make(config: Any) -> Network:
            base = AutoModel.from_config(config, dtype=torch.float32)
            return Network(base.eval(), cls.OUTPUTS, cls.KIND == CAUSAL)

        with bundle.reading(directory):
            times = cls._times_in(bundle)
            tokenizer, network = loaded(bundle, directory, make)
        network.requires_grad_(False)
        return cls(tokenizer, network, times)

    @classmethod
    def _times(cls, programs: Sequence[ProgramExample]) -> CallTimes | None:
        return None

    @classmethod
    def _times_in(cls, bundle: Bundle) -> CallTimes | None:
        return None

    @abstractmethod
    def _train(self, sides: Sides, generator: np.random.Generator) -> None:
        """Train the network on the first of the two sides of the programs. The second one checks it."""

    def _embedded(self, ids: Sequence[Sequence[int]]) -> Any:
        inputs = self.tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt")
        return self.network.embedded(inputs["input_ids"], inputs["attention_mask"])

    def _outputs(self, turns: Sequence[TurnContext]) -> Floats:
        """Return the outputs of the linear layer for each turn, shape [turns, OUTPUTS]."""
        texts = [turn.text for turn in turns]
        kept = {text: self._kept[text] for text in texts if text in self._kept}
        new = [text for text in dict.fromkeys(texts) if text not in kept]
        ids = token_ids(self.tokenizer, new) if new else []
        with torch.no_grad():
            for at in range(0, len(new), BATCH):
                rows = self.network.head(self._embedded(ids[at : at + BATCH])).double().numpy()
                kept.update(zip(new[at : at + BATCH], rows, strict=True))
        self._kept = kept
        found: Floats = np.stack([kept[text] for text in texts])
        return found


class LampsModel(PaperEncoder):
    """The predictor of LAMPS and MARS: a linear classifier on the last token's embedding. The base is not changed."""

    NAME, KIND, MOST_TOKENS = "lamps", CAUSAL, 2048
    TEST_SHARE = 0.2
    """The paper's split is 80/20."""

    def _train(self, sides: Sides, generator: np.random.Generator) -> None:
        """Compute each embedding once, and train the linear layer on them."""

        def of(side: Sequence[TurnExample]) -> Callable[[Sequence[int]], Any]:
            side = sorted(side, key=lambda turn: len(turn.context.text))  # so that batches have little to fill up
            ids = token_ids(self.tokenizer, [turn.context.text for turn in side])
            with torch.no_grad():
                inputs = torch.cat([self._embedded(ids[at : at + BATCH]) for at in range(0, len(ids), BATCH)])
            classes = _classes(side)
            return lambda rows: torch.nn.functional.cross_entropy(self.network.head(inputs[rows]), classes[rows])

        groups = [{"params": list(self.network.head.parameters()), "lr": HEAD_LEARNING_RATE}]
        train_passes(self.network.head, groups, (of(sides[0]), of(sides[1])), (len(sides[0]), len(sides[1])), generator)


class AugserveModel(PaperEncoder):
    """The predictor of AugServe: an encoder that is fine-tuned to classify lengths and to regress durations."""

    NAME, KIND, MOST_TOKENS = "augserve", ENCODER, 512
    TEST_SHARE = 0.3
    """The paper's split of Merge is 70/30. That of ToolBench is 60/40."""
    OUTPUTS = TEN_TOKEN_BINS + 1
    """The last one is the duration of the call, in deviations of its type from the type's mean."""

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`. The distribution has the regression as its mean, and hardly any spread."""
        if not pauses:
            return []
        scores = self._outputs([pause.turn for pause in pauses])[:, -1]
        rows = [self._time_of(pause.tool) for pause in pauses]
        return [
            Distribution.of_mean(DURATION_EDGES, mean + deviation * score)
            for (mean, deviation), score in zip(rows, scores, strict=True)
        ]

    @classmethod
    def _times(cls, programs: Sequence[ProgramExample]) -> CallTimes:
        if (times := CallTimes.observed(programs)) is None:
            raise ConfigError("--traces: no duration of a call is recorded, but the model augserve predicts durations")
        return times

    @classmethod
    def _times_in(cls, bundle: Bundle) -> CallTimes:
        try:
            return CallTimes(_ROWS.validate_python(bundle.settings.get(_TIMES)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, ("settings", _TIMES, *first["loc"])))
            raise ValueError(f"{key}: {first['msg']}") from error

    def _time_of(self, tool: str) -> tuple[float, float]:
        assert self.times is not None
        return self.times.of(tool)

    def _train(self, sides: Sides, generator: np.random.Generator) -> None:
        """Fine-tune the whole network: the loss is the cross entropy of lengths plus the squared error of durations."""

        def of(side: Sequence[TurnExample]) -> Callable[[Sequence[int]], Any]:
            ids, classes, scores = token_ids(self.tokenizer, [t.context.text for t in side]), _classes(side), []
            for turn in side:
                seconds = None if turn.pause_outcome is None else turn.pause_outcome.duration_s
                mean, deviation = self._time_of(turn.pause.tool) if turn.pause else (0.0, 0.0)
                scores.append(np.nan if seconds is None else (seconds - mean) / (deviation or 1.0))
            wanted = torch.tensor(scores, dtype=torch.float32)

            def loss(rows: Sequence[int]) -> Any:
                outputs = self.network.head(self._embedded([ids[row] for row in rows]))
                of_lengths = torch.nn.functional.cross_entropy(outputs[:, :TEN_TOKEN_BINS], classes[rows])
                known = ~torch.isnan(wanted[rows])
                errors = (outputs[:, -1] - wanted[rows])[known]
                return of_lengths + (errors**2).sum() / len(rows)

            return loss

        groups = [
            {"params": list(self.network.base.parameters()), "lr": BASE_LEARNING_RATE},
            {"params": list(self.network.head.parameters()), "lr": HEAD_LEARNING_RATE},
        ]
        train_passes(self.network, groups, (of(sides[0]), of(sides[1])), (len(sides[0]), len(sides[1])), generator)


def _classes(turns: Sequence[TurnExample]) -> Any:
    """Return the bin of each turn's length, of 50 bins; the last one is open."""
    lengths = np.array([turn.outcome.output_tokens for turn in turns], dtype=np.float64)
    return torch.from_numpy(np.minimum(bin_of(LENGTH_EDGES, lengths), TEN_TOKEN_BINS - 1))
