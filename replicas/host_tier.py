"""The host tier: vLLM's offloading connector with a manager that knows programs, on CUDA and on CPU.

This is written for vLLM 0.29.0: `HostCache` is vLLM's CPUOffloadingManager, and `ProgramChunks` is its CachePolicy.
`replicas.vllm_versions` has what differs in newer versions.
vLLM stores a block as soon as it is full, and knows only requests. Here every chunk belongs to the programs whose
newest turn has it in its context. The scheduler reports the state of each program (`HostCache.update`).

Chunks are evicted in this order when room is needed:
    1. chunks without an owner: of programs that ended, of turns without a program, and of contexts that a program no
        longer extends (LRU)
    2. chunks of programs that are resident on the device: the copy is redundant, and losing it costs a store but no
        computation
    3. chunks of programs that are away (swapped or released): the host has the only copy

Within 2 and 3, the chunks of the program with the least worth are evicted first. The worth is the number of seconds
that a loaded token saves, times the probability that it is requested in the next second. This probability is 1 /
expected pause, or 1 / time that the pause has lasted once it is longer than expected, because a pause that has lasted
long is expected to last as long again. The worth of a program that never comes back therefore decreases to 0. A
program's chunks are never evicted for a program of less worth: the store is refused instead, and tried again if that
program is swapped (`HostCache.reopen`). The last chunks of a program are evicted before its first ones, which they
extend. A chunk in the contexts of several programs is evicted with the last of these.

`HostTierSpec` is vLLM's CPUOffloadingSpec with this manager, and with a worker for CPU engines, for which vLLM has
none. On CUDA vLLM's own worker copies: asynchronously, in its own streams, with pinned memory under /dev/shm.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from cluster.config.models import DiskTierConfig
from cluster.core.errors import ConfigError, IntegrityError
from replicas.copying_worker import CopyingWorker
from replicas.disk_tier.identity import model_identity
from replicas.kv_store import check_installed
from replicas.tier_size import fitting_bytes
from replicas.vllm_versions import ChunkStatus, HostChunks, tier_chunks

logger = logging.getLogger("ray.serve")

SHORTEST_PAUSE_S = 0.01
"""Shortest expected pause in seconds. Shorter ones count as this, so that no worth is infinite."""

Entry = tuple[OffloadKey, ChunkStatus]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the scheduler knows of a program, as far as the worth of its copy depends on it."""

    resident: bool
    """Whether its KV is on the device: a turn of it is in flight, or it is held."""
    saved_s: float
    """Seconds that loading one token saves compared with computing it."""
    pause_s: float
    """Expected seconds until the copy is requested."""
    since_s: float
    """Time at which the pause began, in seconds. It has no meaning for a resident program."""
    computed_s: float = 0.0
    """Seconds that computing one token takes."""
    link_s: float = 0.0
    """Seconds in which one token is loaded from the host."""
    returns: bool = True
    """Whether a later turn of the program is expected."""

    def worth(self, now_s: float) -> float:
        """Return the seconds that are saved per token, per second of waiting."""
        waited_s = 0.0 if self.resident else now_s - self.since_s
        return self.saved_s / max(self.pause_s, waited_s, SHORTEST_PAUSE_S)


UNKNOWN = Standing(resident=True, saved_s=0.0, pause_s=1.0, since_s=0.0)
"""The standing of a program of which nothing is known. Its worth is 0."""


@dataclass(slots=True)
class Context:
    """The full chunks of a turn in one KV cache group, whether they are stored or not."""

    request_id: str = ""
    keys: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Account:
    """The chunks of one program."""

    key: str
    number: int = 0
    """Number of accounts that were created before. Of two with the same worth, the older one comes first."""
    standing: Standing = UNKNOWN
    chunks: dict[OffloadKey, None] = field(default_factory=dict)
    """Chunks that are stored or being stored, in the order of the context."""
    contexts: dict[int, Context] = field(default_factory=dict)
    """The context of the newest turn, by KV cache group."""
    leading: int | None = None
    """Number of leading chunks of the main group's context that are stored. All of them are in ``chunks``. More may be
    stored by now. None: it has to be counted again."""
    main: int = 0
    """Number of the KV cache group in which ``leading`` is counted, see `replicas.kv_groups.KvGroups.main`."""

    @property
    def keys(self) -> list[OffloadKey]:
        """Chunks of the newest turn in the main KV cache group."""
        context = self.contexts.get(self.main)
        return context.keys if context else []


class ProgramChunks(CachePolicy):
    """Chunks by the programs that own them. The module's docstring has the order of eviction."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: dict[OffloadKey, ChunkStatus] = {}
        self.accounts: dict[str, Account] = {}
        self.now_s = 0.0
        self.main = 0
        self.storing: Account | None = None
        """The program whose chunks are being inserted, or None if they have no owner."""
        self._owners: dict[OffloadKey, set[Account]] = {}
        self._nobodys: OrderedDict[OffloadKey, None] = OrderedDict()
        self._numbers = itertools.count()
        self._stored: set[Account] = set()
        """The accounts with chunks, and those that have lost all of theirs since the last ranking."""
        self._order: list[Account] | None = None

    # --- vLLM's CachePolicy -------------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the block of a chunk, or None if it is not stored."""
        return self.blocks.get(key)

    def insert(self, key: OffloadKey, block: ChunkStatus) -> None:
        """Insert a chunk that is about to be stored for ``storing``."""
        self.blocks[key] = block
        if self.storing is None:
            self._nobodys[key] = None
        else:
            self._own(self.storing, (key,))

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk, because its store has failed or it is evicted."""
        del self.blocks[key]
        self._nobodys.pop(key, None)
        for owner in self._owners.pop(key, ()):
            owner.chunks.pop(key, None)
            owner.leading = None

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks without an owner as used now. Chunks of a program are handled by :meth:`extend`."""
        for key in reversed(list(keys)):
            if key in self._nobodys:
                self._nobodys.move_to_end(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[Entry] | None:
        """Evict exactly ``n`` chunks for ``storing``. If there are too few, return None and change nothing."""
        victims = self.victims(n, protected)
        if len(victims) < n:
            return None
        for key, _ in victims:
            self.remove(key)
        return victims

    def clear(self) -> None:
        """Remove all chunks. The programs stay."""
        self.blocks.clear()
        self._owners.clear()
        self._nobodys.clear()
        for account in self.accounts.values():
            account.chunks.clear()
            account.leading = None

    # --- ours ---------------------------------------------------------------------------------------------------------

    def victims(self, n: int, protected: Collection[OffloadKey]) -> list[Entry]:
        """Return up to ``n`` chunks that may be evicted for ``storing``, in the order of eviction."""
        found: list[Entry] = []
        for key in self._candidates():
            if len(found) == n:
                break
            block = self.blocks[key]
            if block.ref_cnt == 0 and key not in protected:
                found.append((key, block))
        return found

    def _candidates(self) -> Iterator[OffloadKey]:
        yield from self._nobodys
        storing = self.storing
        limit = 0.0 if storing is None else storing.standing.worth(self.now_s)
        passed: set[Account] = set()
        for account in self._ranked():
            if account is storing or account.standing.worth(self.now_s) >= limit:
                continue
            passed.add(account)
            for key in reversed(account.chunks):
                owners = self._owners[key]
                if len(owners) == 1 or owners <= passed:
                    yield key

    def _ranked(self) -> list[Account]:
        """Return the accounts with chunks in the order of eviction. They are sorted only after an update of one."""
        if self._order is None:
            self._stored = {account for account in self._stored if account.chunks}
            self._order = sorted(
                self._stored, key=lambda a: (not a.standing.resident, a.standing.worth(self.now_s), a.number)
            )
        return self._order

    def update(self, key: str, standing: Standing) -> Account:
        """Set the standing of a program. Return its account, which is created if there is none."""
        account = self.accounts.get(key)
        if account is None:
            account = self.accounts[key] = Account(key, next(self._numbers), main=self.main)
        account.standing = standing
        if account in self._stored:
            self._order = None
        return account

    def extend(self, account: Account, request_id: str, keys: list[OffloadKey]) -> None:
        """Set the context of the program's newest turn. Chunks that it no longer includes lose this owner."""
        group = get_offload_group_idx(keys[0])
        context = account.contexts.get(group) or Context()
        known = len(context.keys)
        if context.request_id == request_id and 0 < known <= len(keys) and context.keys[-1] == keys[known - 1]:
            fresh = keys[known:]
            context.keys.extend(fresh)
            self._own(account, fresh)
            return
        # In the order of the context, whatever the order in which the chunks came.
        before = [key for key in account.chunks if get_offload_group_idx(key) == group]
        for key in before:
            del account.chunks[key]
        account.contexts[group] = Context(request_id, list(keys))
        self._own(account, keys)
        self._disown(account, [key for key in before if key not in account.chunks])

    def drop(self, key: str) -> list[OffloadKey]:
        """Remove a program that has ended. Its chunks lose this owner. Return those that have none any more."""
        account = self.accounts.pop(key, None)
        if account is None:
            return []
        before, account.chunks = account.chunks, {}
        self._stored.discard(account)
        return self._disown(account, before)

    def leading(self, account: Account) -> int:
        """Return how many chunks a turn with this context would find, counted from its first one.

        Another program may have stored some of them again. The account becomes an owner of these, so that the count is
        made again when one of them is removed.
        """
        counted, keys = account.leading or 0, account.keys
        if account.leading is None or (counted < len(keys) and keys[counted] in self.blocks):
            stored = self._stored_from(keys, counted)
            if foreign := [key for key in keys[counted:stored] if key not in account.chunks]:
                self._own(account, foreign)
            account.leading = counted = stored
        return counted

    def _stored_from(self, keys: Sequence[OffloadKey], first: int) -> int:
        """Return the number of the first one of ``keys`` from ``first`` on that is not stored."""
        return next((i for i in range(first, len(keys)) if keys[i] not in self.blocks), len(keys))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every chunk has owners or is listed as without an owner, and all counts hold."""
        for account in self.accounts.values():
            if (account.leading or 0) > self._stored_from(account.keys, 0):
                raise IntegrityError(f"{account.key} counts {account.leading} leading chunks, and not all are stored")
        owned = {(key, account.key) for account in self._stored for key in account.chunks}
        known = {(key, account.key) for key, owners in self._owners.items() for account in owners}
        if owned != known:
            raise IntegrityError(f"{len(owned ^ known)} chunks about which programs and chunks differ")
        if self._owners.keys() | self._nobodys.keys() != self.blocks.keys() or self._owners.keys() & self._nobodys:
            raise IntegrityError(f"{len(self.blocks)} chunks, {len(self._owners)} owned, {len(self._nobodys)} nobody's")

    def _own(self, account: Account, keys: Iterable[OffloadKey]) -> None:
        """Make the program an owner of those of ``keys`` that are stored."""
        for key in keys:
            if key in self.blocks:
                self._nobodys.pop(key, None)
                self._owners.setdefault(key, set()).add(account)
                account.chunks[key] = None
        account.leading = None
        if account.chunks and account not in self._stored:
            self._stored.add(account)
            self._order = None

    def _disown(self, account: Account, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Remove an owner. Return the chunks that have none any more.

        The last chunks come first, so that they are evicted before those that they extend.
        """
        ownerless = []
        for key in reversed(list(keys)):
            owners = self._owners[key]
            owners.discard(account)
            if not owners:
                del self._owners[key]
                self._nobodys[key] = None
                ownerless.append(key)
        return ownerless


class HostCache(HostChunks):
    """vLLM's manager of host blocks, extended by the program that each request belongs to.

    Args:
        num_chunks: capacity of the tier, in chunks.
        tokens_per_chunk: tokens of a chunk in the first KV cache group. `count_in` sets those of another one.
        program_share: largest share of the chunks for one program, in (0, 1]. A chunk that two programs own counts for
            both.
        enable_events: whether vLLM's KV events are on.
    """

    def __init__(self, num_chunks: int, tokens_per_chunk: int, program_share: float, enable_events: bool) -> None:
        super().__init__(
            num_chunks=num_chunks,
            cache_policy=ProgramChunks.__name__,
            cache_policy_module_path=__name__,
            enable_events=enable_events,
        )
        self.tokens_per_chunk = tokens_per_chunk
        self.num_groups = 1
        self.quota_chunks = max(1, int(num_chunks * program_share)) if num_chunks else 0
        self.refused_chunks = 0
        """Number of chunks that were not stored because the program's share or the tier was full."""
        self.stored_chunks = 0
        """Number of chunks that were copied to the host."""
        self.fetched_chunks = 0
        """Number of chunks that were copied back to the device."""
        self._programs: dict[str, str] = {}
        self._closed: set[str] = set()

    @property
    def chunks(self) -> ProgramChunks:
        """The chunks and their owners."""
        policy: ProgramChunks = self._policy
        return policy

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the tier, in tokens."""
        return self.num_chunks // self.num_groups * self.tokens_per_chunk

    @property
    def used_tokens(self) -> int:
        """Tokens of which the tier has a copy. Tokens that are being copied are included."""
        return len(self.chunks.blocks) // self.num_groups * self.tokens_per_chunk

    # --- for the scheduler -----------------------------------------------------------------------------

    def count_in(self, group: int, tokens_per_chunk: int, num_groups: int) -> None:
        """Choose the KV cache group in which the tokens of contexts are counted. Call it before the first turn.

        Args:
            group: number of the group.
            tokens_per_chunk: tokens of a chunk of this group.
            num_groups: number of groups. A chunk of a context is counted as stored in all of them, though those with a
                window store fewer.
        """
        self.chunks.main, self.tokens_per_chunk, self.num_groups = group, tokens_per_chunk, num_groups

    def update(self, key: str, standing: Standing, now_s: float, request_id: str | None = None) -> None:
        """Set the standing of a program.

        Args:
            key: the program's key.
            standing: what the scheduler knows of the program.
            now_s: the scheduler's time, in seconds.
            request_id: a turn of the program that has arrived. None: no turn has arrived.
        """
        self.chunks.now_s = now_s
        self.chunks.update(key, standing)
        if request_id is not None:
            self._programs[request_id] = key

    def forget(self, key: str) -> None:
        """Remove a program that has ended. Chunks of its turns that are still being copied have no owner."""
        self.chunks.drop(key)

    def tokens_of(self, key: str) -> int:
        """Return how many tokens of the program's newest context the host has, counted from the first one."""
        account = self.chunks.accounts.get(key)
        return self.chunks.leading(account) * self.tokens_per_chunk if account else 0

    def could_hold(self, key: str, context_tokens: int) -> bool:
        """Return whether the host has all full chunks of the program's context, or has room for the missing ones."""
        account = self.chunks.accounts.get(key)
        wanted = context_tokens // self.tokens_per_chunk
        if account is None or not 0 < wanted * self.num_groups <= self.quota_chunks:
            return False
        missing = wanted - self.chunks.leading(account)
        if missing <= 0:
            return True
        short = missing * self.num_groups - self.free_chunks
        return short <= 0 or len(self._victims(account, short, account.keys)) == short

    def reopen(self, request_id: str) -> None:
        """Accept this turn's chunks again, although some were refused."""
        self._closed.discard(request_id)

    # --- vLLM's OffloadingManager -------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Do nothing: the scheduler has already reported the program of the request."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request: no store of it will follow."""
        self._programs.pop(req_context.req_id, None)
        self._closed.discard(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Set ``keys`` as the context of a turn. They are of one KV cache group, from the first chunk on."""
        account = self.account(req_context)
        if account is None or not keys:
            super().touch(keys, req_context)
        else:
            self.chunks.extend(account, req_context.req_id, list(keys))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Prepare the store of as many leading chunks as there is room for.

        Chunks after a gap could never be loaded.
        """
        account = self.account(req_context)
        present = [key for key in keys if key in self.chunks.blocks]
        missing = [key for key in keys if key not in self.chunks.blocks]
        room = 0 if req_context.req_id in self._closed else len(missing)
        if account is not None:
            room = min(room, max(0, self.quota_chunks - len(account.chunks)))
        short = room - self.free_chunks
        if short > 0:
            room -= short - len(self._victims(account, short, keys))
        if room < len(missing):
            self._closed.add(req_context.req_id)
            self.refused_chunks += len(missing) - room
        self.chunks.storing = account
        return super().prepare_store(present + missing[:room], req_context)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Record that the chunks are on the host now, or that their store failed."""
        self.stored_chunks += len(keys) if success else 0
        super().complete_store(keys, req_context, success)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Record that the chunks are on the device now."""
        self.fetched_chunks += len(keys)
        super().complete_load(keys, req_context)

    def reset_cache(self) -> None:
        """Remove all chunks from the tier."""
        super().reset_cache()
        self._closed.clear()

    def _victims(self, account: Account | None, n: int, protected: Collection[OffloadKey]) -> list[Entry]:
        self.chunks.storing = account
        return self.chunks.victims(n, set(protected))

    def account(self, req_context: ReqContext) -> Account | None:
        """Return the account of the program that a request belongs to; None: it belongs to none that is known."""
        key = self._programs.get(req_context.req_id)
        return None if key is None else self.chunks.accounts.get(key)


CONNECTOR = "OffloadingConnector"
TIERED_SPEC = "replicas.disk_tier.cache", "TieredSpec"
"""Module and class of the spec with a disk tier."""
PROGRAM_SHARE = 0.25
"""Default of the largest share of the tier for one program."""


def kv_transfer_config(
    num_bytes: int | None,
    program_share: float = PROGRAM_SHARE,
    replicas_here: int = 1,
    disk: DiskTierConfig | None = None,
) -> dict[str, Any]:
    """Return the value of vLLM's engine argument ``kv_transfer_config``.

    Args:
        num_bytes: size of the tier, all ranks of the replica together. None: :func:`fit_tiers` chooses it where the
            replica starts.
        program_share: largest share of the tier for one program.
        replicas_here: number of replicas that share the machine.
        disk: the tier below. None: there is none.
    """
    below = {"disk_path": disk.path, "disk_bytes": disk.bytes} if disk is not None else {}
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": HostTierSpec.__name__ if disk is None else TIERED_SPEC[1],
            "spec_module_path": __name__ if disk is None else TIERED_SPEC[0],
            **below,
            "cpu_bytes_to_use": num_bytes,
            # What a turn generated is in the next turn's prompt.
            "offload_prompt_only": False,
            "program_share": program_share,
            "replicas_here": replicas_here,
        },
    }


def fit_tiers(config: Any) -> None:
    """Complete the configuration of the tiers with what only a replica knows. Call it before any process is forked.

    A host tier without a size gets one that fits this machine. A disk tier gets the identity of its KV.

    Without prefix caching the tier is removed. vLLM may turn that off because the model's attention cannot continue
    from KV that another turn computed; it would load such KV all the same, and generate wrong tokens.

    Args:
        config: vLLM's VllmConfig, which is changed in place.

    Raises:
        ConfigError: the KV of two models could not be distinguished, or a package is not installed.
    """
    transfers = config.kv_transfer_config
    extra = transfers.kv_connector_extra_config if transfers is not None else {}
    if transfers is not None:
        check_installed(transfers.kv_connector)
    if "replicas_here" not in extra:
        return
    if not config.cache_config.enable_prefix_caching:
        logger.warning("there is no host tier: vLLM has turned prefix caching off for this model")
        config.kv_transfer_config = None
        return
    if "disk_path" in extra:
        extra["disk_identity"] = model_identity(config)
    if extra["cpu_bytes_to_use"] is None:
        on_cpu = config.device_config.device_type == "cpu"
        cache_bytes = config.cache_config.kv_cache_memory_bytes if on_cpu else None
        extra["cpu_bytes_to_use"] = fitting_bytes(extra["replicas_here"], cache_bytes)


class HostTierSpec(CPUOffloadingSpec):
    """What vLLM's connector requests: the manager of the host's blocks, and the worker that copies them.

    Raises:
        ConfigError: ``blocks_per_chunk`` is not 1. Here a chunk is always one block.
    """

    _manager: OffloadingManager | None
    _worker: OffloadingWorker | None

    def __init__(self, config: OffloadingConfig) -> None:
        if not self._uses_shared_region():
            self.BLOCK_SIZE_ALIGNMENT = 1  # page alignment is only needed for mapped and pinned memory
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ConfigError(f"kv_transfer_config: a chunk is one block in the host tier, not {self.blocks_per_chunk}")

    def get_manager(self) -> OffloadingManager:
        """Return the manager, for the scheduler."""
        if self._manager is None:
            self._manager = HostCache(
                num_chunks=tier_chunks(self),
                tokens_per_chunk=self.tokens_per_block[0],
                program_share=float(self.extra_config.get("program_share", PROGRAM_SHARE)),
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker, for the engine's worker. On CUDA it is vLLM's own."""
        if self._uses_shared_region():
            return super().get_worker(kv_caches)
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, tier_chunks(self))
        return self._worker
