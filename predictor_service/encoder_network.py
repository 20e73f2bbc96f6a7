"""What the model `encoder` computes: an encoder, one embedding of a text, heads."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from predictor_service.network import Head

HEAD_HIDDEN = 128


class EncoderNetwork(nn.Module):
    """Called with token ids and their mask, shapes [texts, tokens]; logits of all heads, shape [texts, bins].

    Args:
        encoder: Hugging Face's: its config has `hidden_size`, its answer `last_hidden_state`.
        heads: one after the other.
        pooling: the embedding is the mean over a text's tokens, or its last token's.
    """

    def __init__(self, encoder: nn.Module, heads: Sequence[Head], pooling: Literal["mean", "last"]) -> None:
        super().__init__()
        self.encoder = encoder
        self.last = pooling == "last"
        width = encoder.config.hidden_size
        self.norm = nn.LayerNorm(width)
        self.heads = nn.Sequential(
            nn.Linear(width, HEAD_HIDDEN), nn.ReLU(), nn.Linear(HEAD_HIDDEN, sum(head.bins for head in heads))
        )

    def embedded(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Shape [texts, width]."""
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.last:
            return states[torch.arange(len(ids)), mask.sum(dim=1) - 1]
        weights = mask.unsqueeze(2).to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """See the class."""
        return self.heads(self.norm(self.embedded(ids, mask)))
