"""The public measurements, and what a fitted efficiency predicts for each.

`measurements.csv.gz` holds device times of whole steps, times of parts of steps, and times that clients of live engines
saw. The README beside it names the sources, the licences and what each column means.
"""

import csv
import gzip
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel
from replicas.presets import DEVICES, MODELS, Efficiency, roofline

FILE = Path(__file__).with_name("measurements.csv.gz")
RETRIEVED = "2026-11-26"
"""Day on which the measurements were taken from their sources."""

SOURCES = {
    "aic": (
        "NVIDIA aiconfigurator-core 0.12.0: operators measured on the device, added up over the layers",
        "https://pypi.org/project/aiconfigurator-core/0.12.0/",
        "Apache-2.0",
    ),
    "aic-served": (
        "NVIDIA aiconfigurator-core 0.12.0, silicon_sample.csv: live engines under a closed loop of clients",
        "https://pypi.org/project/aiconfigurator-core/0.12.0/",
        "Apache-2.0",
    ),
    "llmservingsim": (
        "LLMServingSim: measured layers, and a live vLLM",
        "https://github.com/casys-kaist/LLMServingSim/tree/5daddb2",
        "MIT",
    ),
    "accelmark": (
        "AccelMark: requests one at a time through a live engine",
        "https://github.com/FreedomIntelligence/AccelMark/tree/5797fc4",
        "CC-BY-4.0",
    ),
    "distserve": (
        "DistServe: the published fit of measured steps of vLLM 0.2.3",
        "https://github.com/LLMServe/DistServe/tree/82831f1",
        "Apache-2.0",
    ),
    "vidur": ("Vidur: measured linear layers", "https://github.com/microsoft/vidur/tree/7d47513", "MIT"),
}
"""Description, address and licence of each source."""

SAME_SHAPE = {"llama-3-8b": "llama-3.1-8b"}
SAME_DEVICE = {"a800-80": "a100-80"}
"""The A800 is an A100 with less NVLink, and its rows are of one device."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row. Tokens, batch and context are fractions where the row is a mean over a second."""

    source: str
    gpu: str
    model: str
    tp: int
    """Number of tensor-parallel ranks."""
    kind: str
    tokens: float
    """Scheduled tokens."""
    batch: float
    """Number of sequences."""
    context: float
    """Decode: tokens of each sequence. Prefill and mixed: tokens before the chunk. Served: tokens of a prompt."""
    seconds: float
    engine: str
    note: str

    @property
    def work(self) -> tuple[float, float, float, float]:
        """The step as arguments of `CostModel.step_s`: scheduled tokens, context tokens, sequences, pairs."""
        if self.kind.startswith(("decode", "tpot")):
            return self.batch, self.batch * self.context, self.batch, self.batch * self.context
        others, length = 0, 0
        if self.kind == "mixed":
            others, length = (int(number) for number in re.findall(r"\d+", self.note))
        new, sequences = self.tokens - others, max(1.0, self.batch - others)
        pairs = new * (self.context + (new / sequences + 1) / 2)
        decoding = others * length
        return self.tokens, sequences * self.context + new + decoding, sequences + others, pairs + decoding

    @property
    def output_tokens(self) -> int:
        """Tokens that each request of a served row generates."""
        return int(self.note.partition("output=")[2])


def load(file: TextIO | None = None) -> list[Measurement]:
    """Read the measurements of the repository, or of another file with the same columns.

    Raises:
        ConfigError: a column is missing, or a number is none; the message has the line.
    """
    if file is None:
        with gzip.open(FILE, "rt", encoding="utf-8", newline="") as own:
            return load(own)
    return list(_rows(csv.DictReader(file)))


def _rows(reader: Iterable[dict[str, str]]) -> Iterator[Measurement]:
    for line, row in enumerate(reader, 2):
        try:
            yield Measurement(
                row["source"],
                row["gpu"],
                row["model"],
                int(row["tp"]),
                row["kind"],
                float(row["tokens"]),
                float(row["batch"]),
                float(row["context"]),
                float(row["measured_ms"]) / 1e3,
                row["engine"],
                row["note"],
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(f"measurements, line {line}: {error}") from None


def cost_of(row: Measurement, reached: Efficiency) -> CostModel:
    """Return the cost model of a row's model, device and number of ranks.

    Raises:
        KeyError: the model or the device is not known.
    """
    shape = replace(MODELS[SAME_SHAPE.get(row.model, row.model)], tensor_parallel=row.tp)
    return roofline(row.model, shape, DEVICES[SAME_DEVICE.get(row.gpu, row.gpu)], reached)


def predicted_s(row: Measurement, reached: Efficiency) -> float:
    """Return the seconds that an efficiency predicts for a row.

    Raises:
        ValueError: the row is an all-reduce, which is predicted by :func:`all_reduce_s`.
    """
    if row.kind == "all_reduce":
        raise ValueError("an all-reduce is no step")
    if row.kind == "layers_without_attention":
        return _bare_layers_s(row, reached)
    cost = cost_of(row, reached)
    if row.kind == "served":
        return _time_between_tokens_s(row, cost)
    if row.kind == "ttft_e2e":
        return cost.prefill_s(round(row.tokens), 0, cost.step_tokens)
    return _step_s(cost, row.work)


def all_reduce_s(row: Measurement, reached: Efficiency) -> float:
    """Return the seconds of one ring all-reduce of 16-bit activations with a hidden size of 8,192."""
    sent = 2 * (row.tp - 1) / row.tp * row.tokens * 8192 * 2
    return reached.all_reduce_s + sent / (DEVICES[row.gpu].device_link * reached.link)


def _step_s(cost: CostModel, work: tuple[float, float, float, float]) -> float:
    tokens, context, sequences, pairs = work
    return cost.step_s(tokens, context, sequences, pairs)  # type: ignore[arg-type]  # rows may be means


def _bare_layers_s(row: Measurement, reached: Efficiency) -> float:
    """Return the seconds of all layers without attention, output layer and all-reduce."""
    shape = MODELS[row.model]
    bare = replace(shape, parameters=shape.layer_parameters, vocabulary=0, tensor_parallel=row.tp)
    device = replace(DEVICES[row.gpu], device_link=float("inf"))
    cost = roofline(row.model, bare, device, replace(reached, all_reduce_s=0.0))
    return replace(cost, context_s=0.0, pair_s=0.0, sequence_s=0.0).step_s(round(row.tokens), 0, 1)


def _time_between_tokens_s(row: Measurement, cost: CostModel) -> float:
    """Return the mean seconds between two tokens of a request in a closed loop.

    While a request generates its tokens, each of the others ends once on average, and the prompt of its successor is
    computed beside a decode of all.
    """
    output = row.output_tokens
    length = row.context + output / 2
    decode = (row.batch, row.batch * length, row.batch, row.batch * length)
    prompt = row.context
    beside = (row.batch + prompt, row.batch * length + prompt, row.batch + 1, row.batch * length + prompt**2 / 2)
    step_s = _step_s(cost, decode)
    return step_s + (row.batch - 1) / output * (_step_s(cost, beside) - step_s)
