"""What the simulator needs of a peer's scheduler: a scheduler that others publish, driven as its users drive it.

A peer is for comparisons only. Nothing that serves imports this package, and no configuration can name a peer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from cluster.core.clock import Clock
from cluster.core.program import ProgramIdentity


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The fields of a request that a peer's client sets, beside prompt and length."""

    priority: int = 0
    """vLLM's ``priority``: the lowest value runs first."""
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Entries of ``SamplingParams.extra_args``, which clients set as ``vllm_xargs``."""


NO_FIELDS = RequestFields()


class Peer:
    """A peer's scheduler. This base drives vLLM's own class, and its client gives no hints.

    One instance serves all replicas of a run, as one client would.
    """

    scheduler_cls: type[Scheduler] = AsyncScheduler
    """The class with vLLM's scheduler constructor."""
    scheduling_policy: str = "fcfs"
    """vLLM's engine argument ``scheduling_policy``."""

    def additional_config(self, max_model_len: int) -> dict[str, Any]:
        """Return vLLM's engine argument ``additional_config``.

        Args:
            max_model_len: largest number of tokens of a context.
        """
        return {}

    def prepare(self, clock: Clock) -> None:
        """Prepare for replicas that run on ``clock``. It is called before a scheduler is made."""

    def attach(self, scheduler: Scheduler) -> None:
        """Prepare a new scheduler."""

    def fields(self, identity: ProgramIdentity, now_s: float) -> RequestFields:
        """Return what the client of the program sends with a turn that arrives now."""
        return NO_FIELDS

    def turn_ended(self, scheduler: Scheduler, identity: ProgramIdentity, tool: str | None) -> None:
        """Notify the scheduler of the end of a turn's response, where the peer observes responses.

        ``tool``: the tool that the response calls; None: it calls none.
        """

    def retained_ids(self, scheduler: Scheduler) -> Collection[str]:
        """Return the ids of the requests that the peer keeps back from vLLM's queues."""
        return ()
