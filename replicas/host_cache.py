"""Which chunks of KV the host tier keeps: LRU by value, and no program takes more than its share.

Written for vLLM 0.29.0: `HostCache` is vLLM's CPUOffloadingManager, `ProgramChunks` its CachePolicy. vLLM stores
eagerly, as soon as a block is full, and knows requests only; here every chunk belongs to the programs whose newest
turn has it in its context. The scheduler says of each program how it stands (`HostCache.tell`).

What goes first when room is needed:
    1. chunks of nobody: programs that ended, turns without a program, contexts that a program no longer extends (LRU)
    2. programs that are resident on the device: their copy is redundant now, losing it costs a store, no computation
    3. programs that are away (swapped or released): what the host has is all there is
Within 2 and 3 by worth, least first: the seconds that a loaded token saves, times the chance that it is asked for in
the next second. That chance is one over the expected pause, and over the time that the pause has lasted already once
it is longer than expected: a pause that has lasted long is expected to last as long again. A program that never comes
back therefore sinks by itself. Nobody is evicted for a program that is worth less: the store is refused instead, and
tried again if the program is swapped (`HostCache.reopen`). A program's last chunks go before its first, which they
extend; a chunk that several programs have in their context goes with the last of them.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import (
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus, CachePolicy

from cluster.errors import IntegrityError

SHORTEST_PAUSE_S = 0.01
"""No expected pause counts as shorter: a program worth infinitely much would never sink."""

Entry = tuple[OffloadKey, BlockStatus]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the scheduler knows of a program that is worth knowing here."""

    resident: bool
    """Its KV is on the device: a turn of it is in flight, or it is held."""
    saved_s: float
    """Seconds that loading a token saves against computing it."""
    pause_s: float
    """Expected seconds until the copy is asked for."""
    since_s: float
    """When the pause began."""

    def worth(self, now_s: float) -> float:
        """Seconds saved per token and second."""
        waited_s = 0.0 if self.resident else now_s - self.since_s
        return self.saved_s / max(self.pause_s, waited_s, SHORTEST_PAUSE_S)


UNKNOWN = Standing(resident=True, saved_s=0.0, pause_s=1.0, since_s=0.0)
"""Of a program that nothing was told of: worth nothing."""


@dataclass(slots=True)
class Context:
    """The whole chunks of a turn in one KV cache group, stored or not."""

    request_id: str = ""
    keys: list[OffloadKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Account:
    """One program's chunks."""

    key: str
    standing: Standing = UNKNOWN
    chunks: dict[OffloadKey, None] = field(default_factory=dict)
    """Stored or being stored, in the order of the context."""
    contexts: dict[int, Context] = field(default_factory=dict)
    """The newest turn's, by KV cache group."""
    leading: int | None = None
    """Leading chunks of the first group's context that are there; None: to be counted anew."""

    @property
    def keys(self) -> list[OffloadKey]:
        """The newest turn's chunks in the first group."""
        context = self.contexts.get(0)
        return context.keys if context else []


class ProgramChunks(CachePolicy):
    """Chunks by the programs that own them; see the module."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.accounts: dict[str, Account] = {}
        self.now_s = 0.0
        self.storing: Account | None = None
        """Whose chunks are being inserted; None: nobody's."""
        self._owners: dict[OffloadKey, set[Account]] = {}
        self._nobodys: OrderedDict[OffloadKey, None] = OrderedDict()
        self._order: list[Account] | None = None

    # --- vLLM's CachePolicy -------------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> BlockStatus | None:
        """The block of a chunk."""
        return self.blocks.get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """A chunk is about to be stored for ``storing``."""
        self.blocks[key] = block
        if self.storing is None:
            self._nobodys[key] = None
        else:
            self._own(self.storing, (key,))

    def remove(self, key: OffloadKey) -> None:
        """A store has failed."""
        del self.blocks[key]
        self._nobodys.pop(key, None)
        for owner in self._owners.pop(key, ()):
            owner.chunks.pop(key, None)
            owner.leading = None

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nobody's chunks: used now. A program's are dealt with by :meth:`extend`."""
        for key in reversed(list(keys)):
            if key in self._nobodys:
                self._nobodys.move_to_end(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[Entry] | None:
        """Exactly ``n`` chunks that ``storing`` may displace, or None and nothing has changed."""
        victims = self.victims(n, protected)
        if len(victims) < n:
            return None
        for key, _ in victims:
            self.remove(key)
        return victims

    def clear(self) -> None:
        """Forget all chunks; the programs stay."""
        self.blocks.clear()
        self._owners.clear()
        self._nobodys.clear()
        for account in self.accounts.values():
            account.chunks.clear()
            account.leading = None

    # --- ours ---------------------------------------------------------------------------------------------------------

    def victims(self, n: int, protected: Collection[OffloadKey]) -> list[Entry]:
        """Up to ``n`` chunks that may go for ``storing``, in the order of the module."""
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
        """Least worth keeping first. Taken again when something was told, not as time goes by: worths move slowly."""
        if self._order is None:
            self._order = sorted(
                self.accounts.values(), key=lambda a: (not a.standing.resident, a.standing.worth(self.now_s))
            )
        return self._order

    def tell(self, key: str, standing: Standing) -> Account:
        """How a program stands from now on; its account."""
        account = self.accounts.get(key)
        if account is None:
            account = self.accounts[key] = Account(key)
        account.standing = standing
        self._order = None
        return account

    def extend(self, account: Account, request_id: str, keys: list[OffloadKey]) -> None:
        """The program's newest turn has this context; what it no longer extends is nobody's from now on."""
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

    def drop(self, key: str) -> None:
        """The program has ended: its chunks are nobody's."""
        account = self.accounts.pop(key, None)
        if account is not None:
            before, account.chunks = account.chunks, {}
            self._disown(account, before)
            self._order = None

    def leading(self, account: Account) -> int:
        """Chunks that a turn with this context would find, from its first one on."""
        if account.leading is None:
            missing = (i for i, key in enumerate(account.keys) if key not in self.blocks)
            account.leading = next(missing, len(account.keys))
        return account.leading

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every chunk is its owners' or nobody's."""
        owned = {(key, account.key) for account in self.accounts.values() for key in account.chunks}
        known = {(key, account.key) for key, owners in self._owners.items() for account in owners}
        if owned != known:
            raise IntegrityError(f"{len(owned ^ known)} chunks of which program and chunk say different things")
        if self._owners.keys() | self._nobodys.keys() != self.blocks.keys() or self._owners.keys() & self._nobodys:
            raise IntegrityError(f"{len(self.blocks)} chunks, {len(self._owners)} owned, {len(self._nobodys)} nobody's")

    def _own(self, account: Account, keys: Iterable[OffloadKey]) -> None:
        """Those of ``keys`` that are stored are the program's, too."""
        for key in keys:
            if key in self.blocks:
                self._nobodys.pop(key, None)
                self._owners.setdefault(key, set()).add(account)
                account.chunks[key] = None
        account.leading = None

    def _disown(self, account: Account, keys: Iterable[OffloadKey]) -> None:
        """Last chunks first, so that they are evicted before the first ones, which they extend."""
        for key in reversed(list(keys)):
            owners = self._owners[key]
            owners.discard(account)
            if not owners:
                del self._owners[key]
                self._nobodys[key] = None


class HostCache(CPUOffloadingManager):
    """vLLM's manager of host blocks, told which program each request is a turn of.

    Args:
        num_chunks: what the tier takes.
        tokens_per_chunk: of the first KV cache group.
        program_share: no program gets more than this part of the chunks; one that two programs share counts for both.
        enable_events: vLLM's KV events are on.
    """

    def __init__(self, num_chunks: int, tokens_per_chunk: int, program_share: float, enable_events: bool) -> None:
        super().__init__(
            num_blocks=num_chunks,
            cache_policy=ProgramChunks.__name__,
            cache_policy_module_path=__name__,
            enable_events=enable_events,
            store_threshold=0,
        )
        self.tokens_per_chunk = tokens_per_chunk
        self.quota_chunks = max(1, int(num_chunks * program_share)) if num_chunks else 0
        self.refused_chunks = 0
        """Chunks that were not stored: the program's share or the tier was full."""
        self.stored_chunks = 0
        """Chunks that have been copied to the host."""
        self.fetched_chunks = 0
        """Chunks that have been copied back."""
        self._programs: dict[str, str] = {}
        self._closed: set[str] = set()

    @property
    def chunks(self) -> ProgramChunks:
        """The chunks and whose they are."""
        policy: ProgramChunks = self._policy
        return policy

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the tier takes."""
        return int(self._num_blocks) * self.tokens_per_chunk

    @property
    def used_tokens(self) -> int:
        """Tokens that the tier has a copy of, those included that are just being copied."""
        return len(self.chunks.blocks) * self.tokens_per_chunk

    # --- what the scheduler says and asks -----------------------------------------------------------------------------

    def tell(self, key: str, standing: Standing, now_s: float, request_id: str | None = None) -> None:
        """How a program stands; ``request_id``: a turn of it has come."""
        self.chunks.now_s = now_s
        self.chunks.tell(key, standing)
        if request_id is not None:
            self._programs[request_id] = key

    def forget(self, key: str) -> None:
        """The program has ended. Its turns that are still being copied are nobody's."""
        self.chunks.drop(key)

    def tokens_of(self, key: str) -> int:
        """Tokens of the program's newest context that the host has, from the first one on."""
        account = self.chunks.accounts.get(key)
        return self.chunks.leading(account) * self.tokens_per_chunk if account else 0

    def could_hold(self, key: str, context_tokens: int) -> bool:
        """The host has all whole chunks of the program's context, or would take those that are missing."""
        account = self.chunks.accounts.get(key)
        wanted = context_tokens // self.tokens_per_chunk
        if account is None or not 0 < wanted <= self.quota_chunks:
            return False
        missing = wanted - self.chunks.leading(account)
        if missing <= 0:
            return True
        short = missing - int(self._get_num_free_blocks())
        return short <= 0 or len(self._victims(account, short, account.keys)) == short

    def reopen(self, request_id: str) -> None:
        """Take this turn's chunks again, although some were refused."""
        self._closed.discard(request_id)

    # --- vLLM's OffloadingManager -------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing; the scheduler has said whose turn it is."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No store of this turn will follow."""
        self._programs.pop(req_context.req_id, None)
        self._closed.discard(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """``keys`` are the context of a turn: of one KV cache group, from the first chunk on."""
        account = self._account(req_context)
        if account is None or not keys:
            super().touch(keys, req_context)
        else:
            self.chunks.extend(account, req_context.req_id, list(keys))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take as many as there is room for, from the first on: what follows a gap would never be loaded."""
        account = self._account(req_context)
        present = [key for key in keys if key in self.chunks.blocks]
        missing = [key for key in keys if key not in self.chunks.blocks]
        room = 0 if req_context.req_id in self._closed else len(missing)
        if account is not None:
            room = min(room, max(0, self.quota_chunks - len(account.chunks)))
        short = room - self._get_num_free_blocks()
        if short > 0:
            room -= short - len(self._victims(account, short, keys))
        if room < len(missing):
            self._closed.add(req_context.req_id)
            self.refused_chunks += len(missing) - room
        self.chunks.storing = account
        return super().prepare_store(present + missing[:room], req_context)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """They are on the host now."""
        self.stored_chunks += len(keys) if success else 0
        super().complete_store(keys, req_context, success)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """They are on the device now."""
        self.fetched_chunks += len(keys)
        super().complete_load(keys, req_context)

    def reset_cache(self) -> None:
        """Empty the tier."""
        super().reset_cache()
        self._closed.clear()

    def _victims(self, account: Account | None, n: int, protected: Collection[OffloadKey]) -> list[Entry]:
        self.chunks.storing = account
        return self.chunks.victims(n, set(protected))

    def _account(self, req_context: ReqContext) -> Account | None:
        key = self._programs.get(req_context.req_id)
        return None if key is None else self.chunks.accounts.get(key)
