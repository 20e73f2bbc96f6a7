"""AgentInfer's scheduler (PyPI ``agentinfer`` 0.2.0), the class of the installed package, under virtual time.

What it does: every turn names a program. A program is active or paused, and a turn of a paused program is kept back
from vLLM's queue. Once a second, and at arrivals, it compares the KV memory with the memory of running and queued
turns, of all active programs whose tools run, and of the growth that active programs are expected to need. A program
is admitted or resumed if it fits (those that ran last first), or if the larger batch gains more than it costs. If it
does not fit, programs whose tools run are paused, and running ones are marked to be paused after their turn. A program
whose tool runs longer than a time to live is paused; this time is fitted to the observed pauses (log-normal, after 100
of them) and bounded by the cost of its prefill. Pausing frees nothing by itself, because vLLM's prefix cache has the KV
of a paused program until its blocks are used again. A turn that waits for 30 to 300 s is resumed in any case. Within
vLLM's queue the order is vLLM's.

How it is driven, as its documentation says for a synchronous engine (``vllm serve --agentinfer
--no-async-scheduling``): the scheduler is ``AgentCacheSyncSchedulerBridge``, settings are in ``additional_config``,
the client sends the header ``x-session-id``, which AgentInfer's own functions turn into ``vllm_xargs``, and the end of
a response without a tool call ends the program. So a turn whose user replies ends it too, as with AgentInfer's
middleware. The coefficients of prefills and decodes "are deployment-specific and should be obtained by calibration":
they are fitted to the cost model by AgentInfer's formula, and ``privileged_max_context_tokens`` is the model's context
length. All other settings have their defaults.

Two things are changed. Its clock is the virtual one. And it supports vLLM 0.23, whose ``find_longest_cache_hit``
returned two values where vLLM 0.29 returns three, so that its look at the cached prefixes of kept turns would fail and
be logged; it gets two values.
"""

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy.optimize import nnls
from vllm.v1.core.sched.scheduler import Scheduler

from cluster.core.clock import Clock
from cluster.core.errors import ConfigError
from cluster.core.program import USER_REPLY, ProgramIdentity
from replicas.cost_model import CostModel
from replicas.peers.peer import NO_FIELDS, Peer, RequestFields

PACKAGE, VERSION = "agentinfer", "0.2.0"
SCHEDULER = "agentinfer.agentcache.core.scheduler"
IDENTITY = "agentinfer.scheduling.identity"
LIFECYCLE = "agentinfer.scheduling.lifecycle"
CLOCKED = (SCHEDULER, "agentinfer.scheduling.runtime", "agentinfer.scheduling.program_registry")
"""The modules that read ``time.monotonic``."""
XARGS_KEY = "agentic_context"
SESSION_HEADER = "x-session-id"
PROMPT_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Prompt lengths of AgentInfer's own calibration. Those that do not fit into memory are left out."""


class AgentInferParameters(BaseModel):
    """Parameters of the peer `agentinfer`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    calibrated: bool = True
    """Whether AgentInfer's costs are fitted to the simulated replica. False: the defaults of the package."""

    def build(self, cost: CostModel) -> Peer:
        """Build the peer.

        Raises:
            ConfigError: the package is not installed, or in another version.
        """
        check_installed()
        return AgentInfer(calibration(cost) if self.calibrated else {})


def check_installed() -> None:
    """Check the installed package.

    Raises:
        ConfigError: the package is not installed, or in another version.
    """
    install = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(f"--policies agentinfer: the package {PACKAGE} is not installed; {install}") from None
    if found != VERSION:
        raise ConfigError(f"--policies agentinfer: {PACKAGE} {found} is installed, not {VERSION}; {install}")


def calibration(cost: CostModel) -> dict[str, float]:
    """Return the settings of ``progress_ttl`` that a calibration on the modelled replica would give, in seconds.

    A cold prefill of x thousand tokens takes a + b·x + c·x², fitted with coefficients of 0 or more. A decode step takes
    a fixed time, a time for each sequence, and a time for each token of the contexts.
    """
    lengths = [tokens for tokens in PROMPT_TOKENS if tokens <= cost.kv_capacity_tokens] or [cost.kv_capacity_tokens]
    thousands = np.array(lengths) / 1000
    seconds = np.array([cost.prefill_s(tokens, chunk_tokens=cost.step_tokens) for tokens in lengths])
    coefficients, _ = nnls(np.column_stack((np.ones(len(lengths)), thousands, thousands**2)), seconds)
    intercept, linear, quadratic = map(float, coefficients)
    return {
        "ttl_prefill_model_intercept_seconds": intercept,
        "ttl_prefill_model_linear_seconds_per_1k_tokens": linear,
        "ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared": quadratic,
        "decode_step_fixed_seconds": cost.overhead_s + cost.weights_s,
        "decode_step_seconds_per_request": cost.sequence_s,
        "decode_step_seconds_per_context_token": cost.context_s + cost.pair_s,
    }


class AgentInfer(Peer):
    """AgentInfer's scheduler and its client.

    Args:
        progress_ttl: settings of ``additional_config.agentcache.progress_ttl`` that differ from the defaults.
    """

    def __init__(self, progress_ttl: dict[str, float]) -> None:
        self._progress_ttl = progress_ttl
        self.scheduler_cls: type[Scheduler] = import_module(SCHEDULER).AgentCacheSyncSchedulerBridge
        self._parse = import_module(IDENTITY).parse_agent_identity
        self._encode = import_module(IDENTITY).encode_agent_identity
        self._terminal = import_module(LIFECYCLE).ProgramLifecycle.TERMINAL

    def additional_config(self, max_model_len: int) -> dict[str, Any]:
        """Return AgentInfer's settings."""
        calibrated = {"privileged_max_context_tokens": max_model_len} if self._progress_ttl else {}
        return {"agentcache": {"progress_ttl": {**self._progress_ttl, **calibrated}}}

    def prepare(self, clock: Clock) -> None:
        """Give AgentInfer's modules the virtual clock in place of the module ``time``."""
        for name in CLOCKED:
            import_module(name).time = SimpleNamespace(monotonic=clock.now_s)  # type: ignore[attr-defined]

    def attach(self, scheduler: Scheduler) -> None:
        """Let AgentInfer observe cached prefixes on a newer vLLM."""
        hooks = scheduler._agentcache
        observe: Callable[[Any], None] = hooks._observe_retained_prefix_cache
        manager = scheduler.kv_cache_manager

        def find_longest_cache_hit(hashes: Any, tokens: int) -> tuple[Any, int]:
            blocks, length, *_ = manager.coordinator.find_longest_cache_hit(hashes, tokens)
            return blocks, length

        older = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(
                prefix_cache_lookup_enabled=manager.prefix_cache_lookup_enabled,
                coordinator=SimpleNamespace(find_longest_cache_hit=find_longest_cache_hit),
            )
        )
        hooks._observe_retained_prefix_cache = lambda owner: observe(older)

    def fields(self, identity: ProgramIdentity, now_s: float) -> RequestFields:
        """Return the identity as AgentInfer's middleware sends it to the scheduler. Without a program: nothing."""
        if identity.key is None:
            return NO_FIELDS
        return RequestFields(extra_args={XARGS_KEY: self._encode(self._identity(identity.key))})

    def turn_ended(self, scheduler: Scheduler, identity: ProgramIdentity, tool: str | None) -> None:
        """End the program if the response has no tool call, as AgentInfer's middleware does."""
        if tool in (None, USER_REPLY) and identity.key is not None:
            program_id = self._identity(identity.key).program_id
            scheduler._agentcache.controller.on_response_completion(program_id, self._terminal)

    def retained_ids(self, scheduler: Scheduler) -> Collection[str]:
        """Return the ids of the turns of paused programs."""
        ids: Collection[str] = scheduler._agentcache.controller.retained_request_ids
        return ids

    def _identity(self, session: str) -> Any:
        return self._parse(headers={SESSION_HEADER: session})
