"""How `network.Networks` are learnt: torch, one core, a minute or so, stopped early on groups that are held out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from predictor_service.distribution import Floats, bin_of
from predictor_service.features import Vectors
from predictor_service.network import Head, Networks, log_prior, standardised

LEAST_COUNT = 0.02
"""Of a bin that was never hit."""
STEPS, LEAST_BATCH = 32, 32
FIRST_TRUST, TRUST_LEARNING_RATE = 0.5, 2e-2
"""In priors, see `Networks.trust`."""
LEAST_SPREAD = 0.05
"""Of a feature: one that hardly ever differs is not blown up."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How the networks are learnt."""

    members: int = 3
    hidden: int = 96
    epochs: int = 12
    batch: int = 256
    """Rows, at most; of few rows fewer, so that there are STEPS an epoch."""
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    dropout: float = 0.35
    crps_weight: float = 1.0
    """Of the ranked probability score in the loss, beside the likelihood: it is what keeps tails honest."""
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What one head is to learn."""

    edges: Floats
    values: Floats
    """Shape [rows]; NaN: not known, and nothing is learnt from it."""
    scale: Floats
    """Shape [rows], positive: what an error of the row's value is measured by."""
    prior: Floats | None
    """Shape [rows, bins]."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Features, and by head what is to be forecast from them."""

    features: Vectors
    targets: Mapping[str, Target]


def train_networks(fit: Rows, held_out: Rows, settings: TrainingSettings) -> Networks:
    """Networks that forecast ``fit``'s targets, as they were when ``held_out`` was forecast best.

    Raises:
        ValueError: one of the two is empty.
    """
    if not (len(fit.features) and len(held_out.features)):
        raise ValueError("networks need rows to learn from, and others to stop at")
    mean = fit.features.mean(axis=0)
    spread = fit.features.std(axis=0) + np.float32(LEAST_SPREAD)
    learnt, watched = _Tensors(fit, mean, spread), _Tensors(held_out, mean, spread)
    with one_core(settings.seed):
        states = [_train_member(learnt, watched, settings) for _ in range(settings.members)]
    arrays = {name: np.stack([state[name].numpy() for state in states]) for name in states[0]}
    heads = tuple(Head(name, len(target.edges) - 1) for name, target in fit.targets.items())
    return Networks(heads=heads, mean=mean, spread=spread, **arrays)


@contextmanager
def one_core(seed: int) -> Iterator[None]:
    """Torch on one core, so that others' work on the machine goes on; and from the same seed the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


class _Tensors:
    """Rows as the loss needs them."""

    def __init__(self, rows: Rows, mean: Vectors, spread: Vectors) -> None:
        self.features = torch.from_numpy(standardised(rows.features, mean, spread))
        self.heads = [_HeadTensors(target) for target in rows.targets.values()]

    def loss(self, net: "_Member", index: Tensor, crps_weight: float) -> Tensor:
        """Summed over heads, the mean over those rows of ``index`` whose value is known."""
        outputs = net(self.features[index])
        total = torch.zeros(())
        start = 0
        for number, head in enumerate(self.heads):
            part = outputs[:, start : start + head.bins]
            total = total + head.loss(part, net.trust[number], index, crps_weight)
            start += head.bins
        return total


class _HeadTensors:
    def __init__(self, target: Target) -> None:
        known = np.isfinite(target.values)
        bins = bin_of(target.edges, np.where(known, target.values, 0.0))
        self.bins = len(target.edges) - 1
        self.known = torch.from_numpy(known.astype(np.float32))
        self.bin = torch.from_numpy(bins)
        self.scale = torch.from_numpy(target.scale.astype(np.float32))
        self.widths = torch.from_numpy(np.diff(target.edges).astype(np.float32))
        self.prior = None if target.prior is None else torch.from_numpy(log_prior(target.prior).astype(np.float32))
        self.reached = torch.triu(torch.ones(self.bins, self.bins))

    def marginal(self) -> Tensor:
        """Logarithms of the bins' shares among the values that are known, shape [bins]."""
        counts = torch.bincount(self.bin[self.known > 0], minlength=self.bins).float()
        return torch.log((counts + LEAST_COUNT) / (counts + LEAST_COUNT).sum())

    def loss(self, logits: Tensor, trust: Tensor, index: Tensor, crps_weight: float) -> Tensor:
        if self.prior is not None:
            logits = logits + trust * self.prior[index]
        known, bins = self.known[index], self.bin[index]
        log_shares = torch.log_softmax(logits, dim=1)
        surprise = -log_shares.gather(1, bins.unsqueeze(1)).squeeze(1)
        cumulated = log_shares.exp().cumsum(dim=1)
        score = ((cumulated - self.reached[bins]) ** 2 * self.widths).sum(dim=1) / self.scale[index]
        return ((surprise + crps_weight * score) * known).sum() / known.sum().clamp(min=1.0)


class _Member(nn.Module):
    """One network in the shape of `Networks`."""

    def __init__(self, rows: _Tensors, settings: TrainingSettings) -> None:
        super().__init__()
        features, hidden = rows.features.shape[1], settings.hidden
        self.first = nn.Parameter(torch.randn(features, hidden) * (2 / features) ** 0.5)
        self.first_bias = nn.Parameter(torch.zeros(hidden))
        self.second = nn.Parameter(torch.randn(hidden, hidden) * (2 / hidden) ** 0.5)
        self.second_bias = nn.Parameter(torch.zeros(hidden))
        # At first it says what the prior and all rows together say.
        self.last = nn.Parameter(torch.zeros(hidden, sum(head.bins for head in rows.heads)))
        shares = [(1.0 if head.prior is None else 1 - FIRST_TRUST) * head.marginal() for head in rows.heads]
        self.last_bias = nn.Parameter(torch.cat(shares))
        self.trust = nn.Parameter(torch.full((len(rows.heads),), FIRST_TRUST))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(torch.relu(inputs @ self.first + self.first_bias))
        hidden = self.dropout(torch.relu(hidden @ self.second + self.second_bias))
        return hidden @ self.last + self.last_bias


def _train_member(fit: _Tensors, held_out: _Tensors, settings: TrainingSettings) -> dict[str, Tensor]:
    """Its state after the epoch that forecast ``held_out`` best; what is there before the first one counts too."""
    net = _Member(fit, settings)
    rows = len(fit.features)
    batch = max(LEAST_BATCH, min(settings.batch, rows // STEPS))
    weights = [weight for name, weight in net.named_parameters() if name != "trust"]
    rates = [settings.learning_rate, TRUST_LEARNING_RATE]
    optimiser = torch.optim.AdamW(
        [{"params": weights, "weight_decay": settings.weight_decay}, {"params": [net.trust], "weight_decay": 0.0}]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates, total_steps=settings.epochs * -(-rows // batch))
    best_loss, best = _held_out_loss(net, held_out, settings), _copy(net)
    for _ in range(settings.epochs):
        net.train()
        for index in torch.randperm(rows).split(batch):
            optimiser.zero_grad()
            fit.loss(net, index, settings.crps_weight).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        loss = _held_out_loss(net, held_out, settings)
        if loss < best_loss:
            best_loss, best = loss, _copy(net)
    return best


def _held_out_loss(net: _Member, held_out: _Tensors, settings: TrainingSettings) -> float:
    net.eval()
    rows = len(held_out.features)
    with torch.no_grad():
        losses = [
            (len(part), float(held_out.loss(net, part, settings.crps_weight)))
            for part in torch.arange(rows).split(4096)
        ]
    return sum(size * loss for size, loss in losses) / rows


def _copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
