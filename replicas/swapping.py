"""Swaps programs out to the host tier at a pause, and loads them when the tool has finished.

vLLM's connector stores a block on the host as soon as it is full, and loads the blocks that a waiting turn finds there.
Swapping a program out therefore only means to free its blocks. They stay in the prefix cache, because InferCept's swap
needs free memory and not empty memory. Blocks that are still cached at the resume need not be loaded. This module adds
three things. It reports to the tier how much the copy of each program is worth. It refuses a swap where the host has no
copy. It loads a program's context before its next turn arrives. Such a load (a fetch) is a request of the scheduler's
own, which no queue, policy or client sees. It uses only free memory that no waiting turn needs.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from cluster.core.errors import ConfigError, IntegrityError
from cluster.core.kv_price import Place
from cluster.core.lifecycle.events import CopyLost, Event, Fetched, FetchFailed, LoadFailure
from cluster.core.lifecycle.machine import Phase, ProgramState
from replicas.cost_model import CostModel
from replicas.disk_tier.cache import TieredCache
from replicas.disk_tier.numbers import DiskNumbers
from replicas.disk_tier.value import host_standing
from replicas.host_tier import HostCache, Standing
from replicas.kv_groups import KvGroups
from replicas.policy import Forecast
from replicas.program_table import ProgramTable
from replicas.vllm_patches import FoundContext, look_up_unless, stop_storing_after, store_again, transfers_under_way
from replicas.vllm_versions import cover_loads, touch_contexts

FETCHED_HOLD_S = 10.0
"""Seconds for which a loaded context is held for the turn that the end of its tool announces."""

RESIDENT = frozenset({Phase.RUNNING, Phase.DECIDING, Phase.HELD, Phase.RESUMING, Phase.FETCHING})
"""Phases in which a program's KV is on the device, or is being loaded."""

PREFIX = "caesura-fetch-"
"""Prefix of the request ids of fetches."""


@dataclass(frozen=True, slots=True)
class Context:
    """The full blocks of a paused program's context, by which its KV is found again."""

    tokens: Sequence[int]
    hashes: Sequence[BlockHash]
    length: int
    """Number of tokens in full blocks."""
    forecast: Forecast
    """The forecast of the turn that the pause followed."""


@dataclass(slots=True)
class Fetch:
    """A load from the host, from the request to the hold."""

    key: str
    request: Request
    loaded: bool = False


@dataclass(frozen=True, slots=True)
class LoadCalls:
    """The scheduler's functions that a fetch calls. Most are of `replicas.vllm_patches.LoadingScheduler`."""

    register: Callable[[Request], None]
    find: Callable[[Request], FoundContext | None]
    fits: Callable[[str, FoundContext], bool]
    """Returns whether free memory suffices for this program's context and for other programs' waiting turns."""
    begin: Callable[[Request, FoundContext], bool]
    complete: Callable[[Request], bool]
    free: Callable[[Request], None]
    abort: Callable[[str], None]
    take_cached: Callable[[FoundContext], Sequence[KVCacheBlock]]
    take_blocks: Callable[[Request], Sequence[KVCacheBlock]]
    hold: Callable[[str, Sequence[KVCacheBlock], int, float, Forecast], float]
    """Holds a program's blocks, given their tokens and the seconds to hold. Returns the time at which the hold ends."""


class Swapping:
    """The host tier of one scheduler. Without a host tier it does nothing.

    Args:
        connector: vLLM's connector of the scheduler, or None if there is none.
        groups: the scheduler's KV cache groups.
        now_s: returns the scheduler's time, in seconds.
        cost: returns the current cost model.
        block_tokens: tokens of a block hash.
        programs: the scheduler's programs.
        apply: applies an event to a program.
        counters: the scheduler's counters.
        calls: the scheduler's functions that a fetch needs.
    """

    def __init__(
        self,
        *,
        connector: Any,
        groups: KvGroups,
        now_s: Callable[[], float],
        cost: Callable[[], CostModel],
        block_tokens: int,
        programs: ProgramTable,
        apply: Callable[[str, Event], object],
        counters: Counter[str],
        calls: LoadCalls,
    ) -> None:
        offloading = getattr(connector, "connector_scheduler", None)
        self._offloading = offloading if isinstance(offloading, OffloadingConnectorScheduler) else None
        if self._offloading is not None:
            cover_loads(self._offloading, connector._kv_cache_config)
        manager = getattr(self._offloading, "manager", None)
        self.disk: TieredCache | None = manager if isinstance(manager, TieredCache) else None
        self.cache: HostCache | None = (
            self.disk.host if self.disk else manager if isinstance(manager, HostCache) else None
        )
        if self.cache is not None:
            if not groups.caching:
                raise ConfigError("kv_transfer_config: the host tier needs prefix caching, which is off for this model")
            counted = groups.main, groups.block_tokens, len(groups.groups)
            self.cache.count_in(*counted)
            if self.disk is not None:
                self.disk.disk.count_in(*counted)
            touch_contexts(self._offloading)
            if self.disk is not None:
                look_up_unless(self.disk.still_loads, self._offloading)
        self._now_s = now_s
        self._cost = cost
        self._block_tokens = block_tokens
        self._programs = programs
        self._apply = apply
        self._counters = counters
        self._calls = calls
        self._contexts: dict[str, Context] = {}
        self._forecasts: dict[str, Standing] = {}
        self._fetches: dict[str, Fetch] = {}
        self._cancelled: set[str] = set()
        self._numbers = itertools.count()

    # --- what it has --------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the host tier, in tokens. 0 means that there is none."""
        return self.cache.capacity_tokens if self.cache else 0

    @property
    def used_tokens(self) -> int:
        """Tokens of which the tier has a copy."""
        return self.cache.used_tokens if self.cache else 0

    @property
    def fetching_tokens(self) -> int:
        """Tokens that are being loaded, for which memory is allocated."""
        return sum(fetch.request.num_computed_tokens for fetch in self._fetches.values())

    @property
    def request_ids(self) -> set[str]:
        """Ids of the requests that are fetches, cancelled ones included."""
        return self._fetches.keys() | self._cancelled

    def disk_numbers(self) -> dict[str, Any]:
        """Return the totals and the state of the disk tier as plain values. Without one they are 0."""
        return DiskNumbers().as_dict() if self.disk is None else self.disk.numbers().as_dict()

    def __len__(self) -> int:
        """Return the number of fetches in progress."""
        return len(self._fetches)

    def tokens_of(self, key: str) -> int:
        """Return how many tokens of a program's context the host has, counted from the first one."""
        return self.cache.tokens_of(key) if self.cache else 0

    def disk_tokens_of(self, key: str) -> int:
        """Return how many tokens of a program's context this replica has on disk, counted from the first one."""
        return self.disk.tokens_of(key) if self.disk else 0

    @property
    def disk_read_s(self) -> float:
        """Measured seconds to read one token's KV from disk. Infinite: nothing can be read."""
        return self.disk.disk.read_s if self.disk else inf

    @property
    def volume(self) -> str:
        """The name of the disk tier's volume. It is empty if there is none that can be read."""
        return self.disk.disk.volume if self.disk else ""

    # --- a turn's way -------------------------------------------------------------------------------------------------

    def arrives(self, request: Request, key: str, forecast: Forecast) -> None:
        """Process the arrival of a turn, which vLLM does not have yet."""
        if self.cache is None:
            return
        self._expect(key, request.num_tokens, forecast)
        self.cache.update(key, self._standing(key, None), self._now_s(), request.request_id)

    def extends(self, request: Request, key: str) -> None:
        """Report to the tier the program of a request that extends its held context."""
        if self.cache is not None and key in self._forecasts:
            self.cache.update(key, self._standing(key, None), self._now_s(), request.request_id)

    def ends(self, request: Request) -> None:
        """Process the end of a turn, whatever its outcome."""
        if self._offloading is not None:
            stop_storing_after(self._offloading, request)

    def pauses(self, request: Request, key: str, context_tokens: int, forecast: Forecast) -> None:
        """Keep the context of a program that pauses. The policy has not decided yet."""
        if self.cache is None:
            return
        self._expect(key, context_tokens, forecast)
        whole = context_tokens // self.cache.tokens_per_chunk * self.cache.tokens_per_chunk
        hashes = request.block_hashes[: whole // self._block_tokens]
        self._contexts[key] = Context(request.all_token_ids[: whole + 1], hashes, whole, forecast)
        if self.disk is not None:
            self.disk.write_down(key, whole, self._standing(key, self._now_s()))
            if self.disk.writes(key):
                self._offer_again(key, request, whole)

    def leave(self, leaving: bool) -> None:
        """Begin or end to write the context of each program that pauses, because it goes to another replica then.

        When it begins, the contexts of the programs that have paused are written, too: those first whose copy saves the
        most per second until the next turn.
        """
        if self.disk is None or self.disk.leaving == leaving:
            return
        self.disk.leaving = leaving
        now_s = self._now_s()
        programs = [self._programs.get(key) for key in self._forecasts] if leaving else []
        paused = {
            program.key: self._standing(program.key, now_s) for program in programs if program and not program.active
        }
        for key, standing in sorted(paused.items(), key=lambda one: -one[1].worth(now_s)):
            if not self.is_on_disk(key):
                self.disk.write_down(key, self.whole(key), standing)

    @property
    def leaves(self) -> bool:
        """Whether contexts of programs that leave are still to be written."""
        return self.disk is not None and self.disk.leaving and self.disk.busy

    def preempted(self, key: str | None, computed_tokens: int) -> None:
        """Keep the copy of a running turn that is preempted: until it is admitted again, the copy is the only one.

        Args:
            key: key of its program. None: it belongs to none.
            computed_tokens: tokens whose KV it loses.
        """
        if self.cache is not None and key is not None and key in self._forecasts:
            now_s = self._now_s()
            saved_s = self._saved_s(computed_tokens)
            away = replace(self._standing(key, now_s), saved_s=saved_s, pause_s=0.0)
            self.cache.update(key, away, now_s)

    def resumes(self, key: str | None) -> None:
        """Process the admission of a turn after a preemption."""
        if self.cache is not None and key is not None and key in self._forecasts:
            self.cache.update(key, self._standing(key, None), self._now_s())

    def is_on_host(self, key: str) -> bool:
        """Return whether the host has all of a paused program's context."""
        return 0 < self.whole(key) <= self.tokens_of(key)

    def is_on_disk(self, key: str) -> bool:
        """Return whether all of a paused program's context is on disk."""
        return self.disk is not None and 0 < self.whole(key) <= self.disk_tokens_of(key)

    def whole(self, key: str) -> int:
        """Return the tokens of a paused program's context that tiers can have: those of its full chunks."""
        if (context := self._contexts.get(key)) is not None:
            return context.length
        program = self._programs.get(key)
        if self.cache is None or program is None:
            return 0
        computed = program.context_tokens - 1  # the last token has no KV
        return max(0, computed // self.cache.tokens_per_chunk * self.cache.tokens_per_chunk)

    def host_room(self, key: str) -> bool:
        """Return whether the host has all of the context of a program that pauses now, or room for it."""
        context, now_s = self._contexts.get(key), self._now_s()
        if self.cache is None or context is None:
            return False
        self.cache.update(key, self._standing(key, now_s), now_s)
        return self.cache.could_hold(key, context.length)

    def will_be_on_disk(self, key: str) -> bool:
        """Return whether the context of a program that pauses now is on disk, or is about to be written."""
        return self.disk is not None and (self.disk.writes(key) or self.is_on_disk(key))

    def swaps_out(self, key: str, request: Request | None = None, place: Place = Place.HOST) -> bool:
        """Return whether the program's blocks may be freed, because a tier has a copy or will have one.

        Args:
            key: key of the program, which has paused.
            request: its turn, if that ends just now. Chunks of it that the host refused are offered again.
            place: the tier.
        """
        if place is Place.DISK:
            swaps = self.is_on_disk(key) if request is None else self.will_be_on_disk(key)
        else:
            swaps = self._has_copy(key, request)
        self._counters["swapped" if swaps else "swap_refused"] += 1
        return swaps

    def _has_copy(self, key: str, request: Request | None) -> bool:
        context = self._contexts.get(key)
        if self.cache is None or context is None:
            return False
        if request is None:
            return self.is_on_host(key)
        if not self.host_room(key):
            return False
        self._offer_again(key, request, context.length)
        return True

    def _offer_again(self, key: str, request: Request, tokens: int) -> None:
        """Offer the chunks of a turn that ends to the host again, if it lacks any of its context.

        It was full when they were computed, or they were being loaded from disk, which has failed since.
        """
        assert self.cache is not None
        missing = self._offloading is not None and self.cache.tokens_of(key) < tokens
        if missing and store_again(self._offloading, request.request_id):
            self.cache.reopen(request.request_id)

    def follow(self, key: str, state: ProgramState | None) -> None:
        """Report a changed program state to the tier: whether its copy is the only one, and since when."""
        if self.cache is None or state is None or key not in self._forecasts:
            return
        since_s = state.last_event_s if state.paused_s is None else state.paused_s
        standing = self._standing(key, None if state.phase in RESIDENT else since_s)
        self.cache.update(key, standing, self._now_s())
        if self.disk is not None:
            self.disk.follow(key, standing)
        if state.phase in (Phase.RUNNING, Phase.RELEASED):
            self._contexts.pop(key, None)

    def forget(self, key: str) -> None:
        """Remove a program that has ended."""
        self._contexts.pop(key, None)
        self._forecasts.pop(key, None)
        if self.cache is not None:
            self.cache.forget(key)
        if self.disk is not None:
            self.disk.forget(key)

    def moves(self, key: str) -> None:
        """Process that a program has moved to another replica, before it ends here. Its copy on disk stays."""
        if self.disk is not None:
            self.disk.disown(key)

    def loaded_tokens(self, key: str) -> int:
        """Return how many tokens were loaded from disk for the program's turn that is being admitted."""
        return self.disk.take_loaded_tokens(key) if self.disk is not None else 0

    def _expect(self, key: str, context_tokens: int, forecast: Forecast) -> None:
        """Keep what the program's copy is worth. It is 0 where no later turn is expected."""
        returns = forecast.later_turns > 0
        saved_s = self._saved_s(context_tokens) if returns else 0.0
        cost, tokens = self._cost(), max(1, context_tokens)
        computed_s, link_s = cost.prefill_s(tokens) / tokens, cost.swap_s(tokens) / tokens
        self._forecasts[key] = Standing(True, saved_s, max(0.0, forecast.pause_s), 0.0, computed_s, link_s, returns)

    def _saved_s(self, context_tokens: int) -> float:
        """Return the seconds that loading one token of a context saves compared with computing it."""
        cost, tokens = self._cost(), max(1, context_tokens)
        return max(0.0, cost.prefill_s(tokens) - cost.swap_s(tokens)) / tokens

    def _standing(self, key: str, away_since_s: float | None) -> Standing:
        standing = replace(self._forecasts[key], resident=away_since_s is None, since_s=away_since_s or 0.0)
        return host_standing(standing, self.disk_read_s) if self.is_on_disk(key) else standing

    # --- fetches ------------------------------------------------------------------------------------------------------

    def fetch(self, key: str) -> None:
        """Begin to load a swapped program's context. The next steps do the work."""
        context = self._contexts.get(key)
        if self.cache is None or context is None or not context.length:
            self._lose(key, LoadFailure.NO_CONTEXT)
            return
        request_id = f"{PREFIX}{next(self._numbers)}"
        request = Request(request_id, list(context.tokens), SamplingParams(max_tokens=1), None)
        request.block_hashes = list(context.hashes)
        self._fetches[request_id] = Fetch(key, request)
        self._calls.register(request)
        # The request bypasses vLLM's queue, so the tier gets its program here.
        self.cache.update(key, self._standing(key, None), self._now_s(), request_id)

    def cancel(self, key: str) -> None:
        """Cancel the program's fetches. Blocks that are being loaded are freed when the load has finished."""
        for request_id in [i for i, fetch in self._fetches.items() if fetch.key == key]:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        del self._fetches[request_id]
        self._cancelled.add(request_id)
        self._calls.abort(request_id)

    def step(self) -> None:
        """Begin loads that can begin, and hold the loaded contexts. It is called before each step."""
        if self.disk is not None:
            for key in self.disk.disk.take_written():
                self.follow(key, self._programs.get(key))
        for fetch in list(self._fetches.values()):
            if fetch.request.is_finished():  # all requests are being aborted; it is freed when its load has finished
                continue
            if fetch.request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._start(fetch)
            elif self._calls.complete(fetch.request):
                fetch.loaded = True
                self._calls.free(fetch.request)  # which calls :meth:`freed`

    def _start(self, fetch: Fetch) -> None:
        found = self._calls.find(fetch.request)
        if found is None:
            return
        if found.local + found.remote == 0:
            self._lose(fetch.key, LoadFailure.GONE)
        elif not self._calls.fits(fetch.key, found):
            self._fail(fetch)
        elif found.remote == 0:  # the prefix cache still has all that the host has
            blocks = self._calls.take_cached(found)
            self._abort(fetch.request.request_id)
            self._hold(fetch, blocks, found.local)
        elif not self._calls.begin(fetch.request, found):
            self._fail(fetch)

    def freed(self, request: Request) -> None:
        """Process the end of a fetch: it is loaded, it was cancelled, or all requests are being aborted."""
        fetch = self._fetches.pop(request.request_id, None)
        self._cancelled.discard(request.request_id)
        if fetch is None:
            return
        if not fetch.loaded:
            self._counters["fetch_failed"] += 1
            self._apply(fetch.key, FetchFailed(self._now_s(), LoadFailure.ABORTED))
            return
        self._hold(fetch, self._calls.take_blocks(request), request.num_computed_tokens)

    def _hold(self, fetch: Fetch, blocks: Sequence[KVCacheBlock], tokens: int) -> None:
        forecast = self._contexts[fetch.key].forecast
        until_s = self._calls.hold(fetch.key, blocks, tokens, FETCHED_HOLD_S, forecast)
        self._counters["fetched"] += 1
        self._apply(fetch.key, Fetched(self._now_s(), until_s))

    def _fail(self, fetch: Fetch) -> None:
        self.cancel(fetch.key)
        self._counters["fetch_failed"] += 1
        self._apply(fetch.key, FetchFailed(self._now_s(), LoadFailure.NO_MEMORY))

    def _lose(self, key: str, reason: LoadFailure) -> None:
        self._counters["fetch_lost"] += 1
        self._apply(key, CopyLost(self._now_s(), reason))

    # --- the whole tier -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Invalidate all copies. Programs that are swapped or being loaded have lost theirs."""
        if self.disk is not None:
            self.disk.abandon_writes()
        for key in list(self._contexts):
            program = self._programs.get(key)
            if program is not None and program.phase in (Phase.SWAPPED, Phase.FETCHING):
                self._apply(key, CopyLost(self._now_s(), LoadFailure.CACHE_RESET))

    @property
    def may_reset(self) -> bool:
        """Whether vLLM's connector may be reset: not twice between two steps, if transfers were in progress."""
        return self._offloading is None or not transfers_under_way(self._offloading)

    def uses_disk(self) -> bool:
        """Process the transfers to and from the disk that have ended, as a step does. Return whether any has not.

        A reset would wait for it in the engine's thread, and the disk may hang.
        """
        return self.disk is not None and self.disk.uses_disk()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless exactly the programs in FETCHING have a fetch, and the tier is consistent."""
        for fetch in self._fetches.values():
            program = self._programs.get(fetch.key)
            if program is None or program.phase is not Phase.FETCHING:
                raise IntegrityError(f"{fetch.key} is being fetched but {program and program.phase}")
        if self.cache is not None:
            self.cache.chunks.check_integrity()
