"""In the engine's process: requests that break it, as a faulty kernel would. Only a stand's replicas can import it."""

import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

KEY = "test_breaks"
"""Of ``vllm_xargs``: one of WAYS."""


def _raise() -> None:
    raise RuntimeError("broken on request")


WAYS: dict[str, Callable[[], None]] = {"raises": _raise, "aborts": os.abort}


class Breaking(LogitsProcessor):
    """One of vLLM's custom logits processors; it leaves the logits alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        """Yes."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The step's new requests are known here, before the model computes."""
        for _, params, _, _ in batch_update.added if batch_update else ():
            if (way := (params.extra_args or {}).get(KEY)) is not None:
                WAYS[way]()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return logits
