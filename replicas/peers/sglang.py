"""SGLang's scheduling by its published rule, on vLLM's engine.

Source: SGLang 0.5.23 (PyPI, 2026-10), with its defaults: ``schedule_policy.py``, ``scheduler.py``,
``schedule_batch.py`` and ``new_token_ratio_tracker.py`` in ``sglang/srt/managers``, and ``prefill_budget.py`` in
``sglang/srt/mem_cache``. No code is copied. `replicas.peers.sglang_scheduler` has the rule, and says what differs.

``sglang`` is the default policy, first come, first served. ``sglang-lpm`` is SGLang with ``--schedule-policy lpm``.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from replicas.cost_model import CostModel
from replicas.peers.peer import Peer
from replicas.peers.sglang_scheduler import KEY, SglangScheduler


class SglangParameters(BaseModel):
    """Parameters of the peer `sglang`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    policy: Literal["fcfs", "lpm"] = "fcfs"
    """``--schedule-policy``: by arrival, or the longest cached prefix first."""
    known_lengths: bool = False
    """Whether a request's ``max_tokens`` is its true length. False: clients set no limit, as agents do, so that the
    context length is the limit."""

    def build(self, cost: CostModel) -> Peer:
        """Return SGLang's scheduler. ``cost`` is not used: it orders and admits turns by tokens, not by time."""
        return Sglang(self)


class SglangLpmParameters(SglangParameters):
    """Parameters of the peer `sglang-lpm`."""

    policy: Literal["fcfs", "lpm"] = "lpm"


class Sglang(Peer):
    """SGLang's rule. Its client gives no hints.

    Args:
        parameters: the parameters.
    """

    scheduler_cls = SglangScheduler

    def __init__(self, parameters: SglangParameters) -> None:
        self._parameters = parameters

    def additional_config(self, max_model_len: int) -> dict[str, Any]:
        """Return all parameters under the key from which the scheduler of this peer reads them."""
        return {KEY: self._parameters.model_dump()}
