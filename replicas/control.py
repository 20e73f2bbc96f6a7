"""The side channel into a replica's scheduler. Its operations run between two steps and have bounded cost.

Arguments and results are plain msgpack values. Importing this module adds one utility method to vLLM's EngineCore in
this process. The engine therefore gets its scheduler's class by the name SCHEDULER. The replica calls the method
through the engine client. An operation that cannot be done returns ``{"refused": why}``; it never raises inside the
engine.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pydantic
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.config.schema import PolicyConfig
from cluster.core.errors import ConfigError, ControlRefused, ControlTimeout, EngineGone
from cluster.core.lifecycle.events import Ended, HoldEnded, ReleaseReason, ToolFinished, ToolStarted
from cluster.core.lifecycle.machine import Phase
from cluster.core.turn import unpack_ids
from replicas.duration_sync import unpack_parts
from replicas.early_prefill import EndReason
from replicas.engine_costs import kv_bytes_per_token
from replicas.hold_table import HoldOrigin
from replicas.routing_view import routing_snapshot
from replicas.scheduler import AgentScheduler
from replicas.stats import cached_blocks
from replicas.vllm_patches import install_utility, salt_block_hashes

UTILITY = "caesura_control"
"""Name of the EngineCore method."""

SCHEDULER = f"{__name__}.{AgentScheduler.__name__}"
"""The scheduler's class for vLLM's argument ``scheduler_cls``. Resolving the name imports this module."""


class ControlChannel:
    """The replica's side of the channel.

    Args:
        engine_client: vLLM's AsyncLLM.
        timeout_s: seconds after which a call without an answer raises ControlTimeout. Every call needs it, because no
            call is answered after the death of the engine.
    """

    def __init__(self, engine_client: Any, timeout_s: float) -> None:
        self._engine_client = engine_client
        self._timeout_s = timeout_s

    async def call(self, operation: str, *, within_s: float | None = None, **payload: Any) -> dict[str, Any]:
        """Run one operation of OPERATIONS in the scheduler.

        Args:
            operation: its name.
            within_s: seconds to wait for the answer. None: the channel's ``timeout_s``.
            payload: its arguments.

        Raises:
            ControlRefused: the scheduler refused, with a reason, and nothing was changed.
            ControlTimeout: there was no answer in time. It is unknown whether the operation was done.
            EngineGone: the engine is dead.
        """
        if self._engine_client.errored:
            raise EngineGone(f"{operation}: the engine is dead")
        core, limit_s = self._engine_client.engine_core, self._timeout_s if within_s is None else within_s
        try:
            answer: dict[str, Any] = await asyncio.wait_for(
                core.call_utility_async(UTILITY, operation, payload), limit_s
            )
        except EngineDeadError as error:
            raise EngineGone(f"{operation}: the engine is dead") from error
        except TimeoutError as error:
            if self._engine_client.errored:
                raise EngineGone(f"{operation}: the engine is dead") from error
            raise ControlTimeout(f"{operation}: no answer from the scheduler within {limit_s} s") from error
        if "refused" in answer:
            raise ControlRefused(str(answer["refused"]))
        return answer


def dispatch(scheduler: AgentScheduler, operation: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Run an operation. Return ``{"refused": why}`` where it cannot be done."""
    run = OPERATIONS.get(operation)
    if run is None:
        return {"refused": f"unknown operation {operation!r}; there are: {', '.join(OPERATIONS)}"}
    try:
        return run(scheduler, **payload)
    except (ControlRefused, ConfigError, pydantic.ValidationError, TypeError, ValueError) as error:
        return {"refused": f"{operation}: {error}"}


def _exchange(
    scheduler: AgentScheduler,
    durations: bytes | None = None,
    forgotten: Sequence[str] = (),
    revision: int | None = None,
    observed: int | None = None,
    noted: int | None = None,
    billed: int | None = None,
) -> dict[str, Any]:
    """Exchange tool durations with the other replicas, and end expired holds, which matters while nothing runs.

    Args:
        scheduler: the replica's scheduler.
        durations: packed statistics of the tools of which the other replicas have observed more. None: there are none.
        forgotten: tools of which the others no longer have statistics.
        revision: revision of this scheduler's durations that the replica has. None: it does not want any.
        observed: number of observations that the replica has, see `replicas.stats.Stats.observations`. None: it does
            not want any.
        noted: number of notes of traced turns that the replica has. None: it does not want any.
        billed: revision up to which bills of programs are written, see `replicas.bills`. None: it does not want any.
    """
    if durations is not None:
        scheduler.durations.update_others(unpack_parts(durations), forgotten)
    scheduler.expire_holds(scheduler.clock.now_s())
    notes = scheduler.stats.traces.notes
    fresh = notes.since(notes.number if noted is None else noted)
    billed, bills = scheduler.bills.since(billed)
    reached, own = (0, b"") if revision is None else scheduler.duration_changes.since(revision, scheduler.durations)
    return {
        "durations": own,
        "revision": reached,
        "snapshot": snapshot(scheduler),
        "observations": scheduler.stats.observations(observed),
        "traced": {"number": fresh.number, "notes": list(fresh.items)},
        "bills": {"revision": billed, "packed": msgspec.msgpack.encode(bills)},
    }


def _routing(scheduler: AgentScheduler, replica: str, model: str, number: int, draining: bool) -> dict[str, Any]:
    """Return the replica's snapshot for the router. Also end expired holds, which matters while nothing runs.

    From a replica that drains, contexts are written to disk (`Swapping.leave`).
    """
    scheduler.expire_holds(scheduler.clock.now_s())
    scheduler.swapping.leave(draining)
    return {"snapshot": routing_snapshot(scheduler, replica, model, number, draining).encode()}


def _moved(scheduler: AgentScheduler, key: str) -> dict[str, Any]:
    """End a program here that has moved to another replica. Its turns in flight end first."""
    if scheduler.programs.get(key) is None:
        return {"moved": False}
    scheduler.swapping.moves(key)
    scheduler.apply(key, Ended(scheduler.clock.now_s(), ReleaseReason.MOVED))
    return {"moved": True}


def _leave(scheduler: AgentScheduler) -> dict[str, Any]:
    """Write the contexts of paused programs to disk, because this replica ends. Return whether any is still written."""
    scheduler.swapping.leave(True)
    return {"leaves": scheduler.swapping.leaves}


def snapshot(scheduler: AgentScheduler) -> dict[str, Any]:
    """Return the replica's numbers: memory in blocks, tokens and bytes, queues, programs, and totals since start."""
    now_s, cache = scheduler.clock.now_s(), scheduler.swapping.cache
    pool, layout = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config
    ranks = scheduler.vllm_config.parallel_config.world_size
    waiting = (turn for turn in scheduler.turns.values() if turn.admitted_s is None)
    parser_failures = scheduler.tool_names.parser_failures if scheduler.tool_names else 0
    return {
        "policy": scheduler.policy_config.name,
        "block_size": scheduler.block_size,
        "kv_groups": len(scheduler.groups.groups),
        "reuses_kv": scheduler.groups.caching,
        "reuses_partial_contexts": scheduler.groups.prefixes_stay,
        "computes_early": scheduler.early_prefill.enabled,
        "total_blocks": pool.num_gpu_blocks - 1,
        "free_blocks": pool.get_num_free_blocks(),
        "cached_blocks": cached_blocks(pool.blocks),
        "held_blocks": scheduler.holds.num_blocks,
        "held_tokens": scheduler.holds.num_tokens,
        "held_programs": len(scheduler.holds),
        "host_tokens": scheduler.swapping.capacity_tokens,
        "host_used_tokens": scheduler.swapping.used_tokens,
        "fetching_programs": len(scheduler.swapping),
        **scheduler.swapping.disk_numbers(),
        "arrived_with_kv": scheduler.counters["arrived_with_kv"],
        "running": len(scheduler.running),
        "waiting": sum(len(queue) for queue in scheduler.waiting_queues),
        "waiting_slo_missed": sum(queue.late for queue in scheduler.waiting_queues),
        "oldest_waiting_s": max((now_s - turn.arrived_s for turn in waiting), default=0.0),
        "step_budget_tokens": int(scheduler.max_num_scheduled_tokens),
        "step_time_ratio": scheduler.pace.scale,
        "programs": len(scheduler.programs),
        "programs_completed": scheduler.programs.concluded,
        "token_bytes": kv_bytes_per_token(layout, ranks, scheduler.groups.tokens_in(layout.num_blocks)),
        "stored_tokens": cache.stored_chunks // cache.num_groups * cache.tokens_per_chunk if cache else 0,
        "fetched_tokens": cache.fetched_chunks // cache.num_groups * cache.tokens_per_chunk if cache else 0,
        **scheduler.early_prefill.numbers(),
        **scheduler.stats.numbers(),
        "counters": {**scheduler.counters, "tool_parser_failures": parser_failures, "lost_bills": scheduler.bills.lost},
    }


def _program(scheduler: AgentScheduler, key: str) -> dict[str, Any]:
    """Return the program's state, turns and events. It is empty if this replica does not know the program."""
    found = scheduler.programs.to_public_dict(key)
    return {**found, "gpu": scheduler.gpu_times.program(key).to_public_dict()} if found else {}


def _sessions(scheduler: AgentScheduler, tenant: str, limit: int) -> dict[str, Any]:
    """Return a tenant's programs, the one served last first, at most ``limit``."""
    return {"sessions": scheduler.programs.sessions(tenant, limit, scheduler.clock.now_s())}


PAUSED = (Phase.HELD, Phase.RELEASED, Phase.SWAPPED, Phase.FETCHING)


def _paused(scheduler: AgentScheduler, key: str) -> bool:
    """Return whether a notification of a program's tools is in time, and count those that are not.

    It is late if the program's next turn, its end or its move to another replica came first. This is no fault, because
    nobody waits for notifications.
    """
    program = scheduler.programs.get(key)
    paused = program is not None and program.phase in PAUSED and not program.active
    if not paused:
        scheduler.counters["late_tool_notification"] += 1
    return paused


def _hold(scheduler: AgentScheduler, key: str, seconds: float) -> dict[str, Any]:
    """Let the hold of a held program end ``seconds`` from now."""
    if key not in scheduler.holds:
        raise ControlRefused(f"{key} holds nothing that could be held longer")
    limit_s = scheduler.settings.limits.max_pin_s
    if not 0 <= seconds <= limit_s:
        raise ControlRefused(f"seconds must be between 0 and {limit_s}, not {seconds}")
    scheduler.holds.extend(key, scheduler.clock.now_s() + seconds, HoldOrigin.ASKED)
    return {"held_blocks": len(scheduler.holds.get(key).blocks)}  # type: ignore[union-attr]


def _release(scheduler: AgentScheduler, key: str) -> dict[str, Any]:
    """Free a held program's blocks."""
    if key not in scheduler.holds:
        return {"released": False}
    scheduler.apply(key, HoldEnded(scheduler.clock.now_s(), ReleaseReason.ASKED))
    return {"released": True}


def _end(scheduler: AgentScheduler, key: str) -> dict[str, Any]:
    """End a program that will not come back. Its turns in flight go on."""
    if scheduler.programs.get(key) is None:
        return {"ended": False}
    scheduler.apply(key, Ended(scheduler.clock.now_s(), ReleaseReason.ASKED))
    return {"ended": True}


def _tool_started(
    scheduler: AgentScheduler, key: str, tools: list[str], expected_s: float | None = None
) -> dict[str, Any]:
    """Record that these tools run now.

    A hold then lasts at least as long as they are expected to, unless a review of the pause policy ends it earlier. A
    hold that a client asked for is not reviewed.
    """
    if not _paused(scheduler, key):
        return {"paused": False}
    now_s = scheduler.clock.now_s()
    scheduler.apply(key, ToolStarted(now_s, tuple(tools)))
    held = scheduler.holds.get(key)
    if held is not None and expected_s is not None:
        until_s = now_s + min(max(0.0, expected_s), scheduler.settings.limits.max_pin_s)
        scheduler.holds.extend(key, max(held.until_s, until_s))
    return {"held": held is not None}


def _tool_finished(scheduler: AgentScheduler, key: str) -> dict[str, Any]:
    """Record that a paused program's slowest tool is done.

    Its duration enters the statistics, and a swapped context is loaded.
    """
    if not _paused(scheduler, key):
        return {"paused": False}
    scheduler.apply(key, ToolFinished(scheduler.clock.now_s()))
    program = scheduler.programs.get(key)
    return {"held": key in scheduler.holds, "fetching": program is not None and program.phase is Phase.FETCHING}


def _extend(scheduler: AgentScheduler, key: str, at: int, ids: bytes, rewrites: bool = False) -> dict[str, Any]:
    """Set a paused program's next prompt from token ``at`` on, as far as it is known, so that it is computed early.

    ``ids`` are packed, and ``rewrites`` is as for `EarlyPrefill.extend`. The answer says why they are not computed, or
    None.
    """
    if not _paused(scheduler, key):
        return {"ended": str(EndReason.NOT_HELD)}
    ended = scheduler.early_prefill.extend(key, at, unpack_ids(ids), rewrites=rewrites)
    return {"ended": None if ended is None else str(ended)}


def _set_policy(scheduler: AgentScheduler, **policy: Any) -> dict[str, Any]:
    """Use another policy from now on. The arguments are the fields of `cluster.config.schema.PolicyConfig`."""
    scheduler.use_policy(PolicyConfig.model_validate(policy))
    return _policy(scheduler)


def _policy(scheduler: AgentScheduler) -> dict[str, Any]:
    return scheduler.policy_config.model_dump(exclude_none=True)


def _reset(scheduler: AgentScheduler) -> dict[str, Any]:
    """End all holds, and empty the prefix cache and the host tier.

    It is not done while turns, copies or the disk use them. Then nothing has changed.
    """
    if scheduler.swapping.uses_disk():
        return {"reset": False, "reason": "copies to or from the disk are under way"}
    blocks, pool = scheduler.kv_cache_manager.get_blocks, scheduler.kv_cache_manager.block_pool
    owners = [request_id for request_id in scheduler.requests if any(blocks(request_id).blocks)]
    if turns := sum(request_id in scheduler.turns for request_id in owners):
        return {"reset": False, "reason": f"turns that use the cache: {turns}"}
    # Memory of a turn that has ended may still be written by a step in flight. Nobody owns it.
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if not owners and used <= scheduler.holds.num_blocks and scheduler.reset_prefix_cache(reset_connector=True):
        return {"reset": True}
    return {"reset": False, "reason": "copies to or from the host tier, or a step, are under way"}


def _salt_kv(scheduler: AgentScheduler, salt: str) -> dict[str, Any]:
    """Let the hashes of KV blocks depend on a text from now on. Requests that exist keep theirs until `renew_kv`."""
    salt_block_hashes(salt)
    return {}


def _settle(scheduler: AgentScheduler) -> dict[str, Any]:
    """End all holds and loads. Answer whether nothing is copied any more, and whether only steps end what is.

    Copies between the host and the disk end without steps.
    """
    scheduler.reset_prefix_cache(reset_connector=False)
    scheduler.swapping.reset()
    loads = any(scheduler.is_loading(turn) for queue in scheduler.waiting_queues for turn in queue)
    swapping = scheduler.swapping
    steps = loads or bool(swapping.request_ids)
    return {"settled": not steps and not swapping.uses_disk(), "steps": steps}


def _renew_kv(scheduler: AgentScheduler, version: str) -> dict[str, Any]:
    """Drop all KV, and let the turns compute theirs again, since the weights have this version now.

    Answer with the number of output tokens of each turn.
    """
    tokens = {request_id: scheduler.requests[request_id].num_output_tokens for request_id in scheduler.turns}
    scheduler.weights_version = version
    for request_id, turn in scheduler.turns.items():
        turn.weights = (*turn.weights, version) if tokens[request_id] else (version,)
    scheduler.renew_kv(turn for queue in scheduler.waiting_queues for turn in queue)
    for queue in scheduler.waiting_queues:  # turns that were loaded have lost their rank
        queue.rerank_all()
    scheduler.returning_outputs.rehashed()
    return {"tokens": tokens}


OPERATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "exchange": _exchange,
    "routing": _routing,
    "moved": _moved,
    "leave": _leave,
    "program": _program,
    "sessions": _sessions,
    "hold": _hold,
    "release": _release,
    "end": _end,
    "tool_started": _tool_started,
    "tool_finished": _tool_finished,
    "extend": _extend,
    "set_policy": _set_policy,
    "policy": _policy,
    "reset": _reset,
    "salt_kv": _salt_kv,
    "settle": _settle,
    "renew_kv": _renew_kv,
}
"""Every operation of the side channel, by name."""


install_utility(UTILITY, dispatch)
