"""The KV cache groups of a model: which of its layers keep KV for every token, and what follows from that.

vLLM divides a model's layers into groups. Each group has a block table of its own, and all take blocks from one pool. A
group with full attention keeps every block of a context. A group with a sliding window keeps the last ones, and a
state-space group keeps the newest state. Prefix caching finds a beginning of a context only where every group has what
it needs to continue from there.

It uses these names of vLLM: KVCacheConfig.kv_cache_groups, the specs of `vllm.v1.kv_cache_interface`, and
BlockHashListWithBlockSize.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashListWithBlockSize, KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group."""

    block_tokens: int
    most_blocks: int | None
    """Largest number of blocks of one context. None: there is no bound."""
    whole: bool
    """Whether each token keeps its KV, so that every beginning of a context can be continued."""

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks of a context."""
        blocks = -(-tokens // self.block_tokens)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The groups of one scheduler."""

    groups: tuple[Group, ...]
    caching: bool
    """Whether vLLM has a prefix cache. Without one, no turn finds the KV of another."""
    hash_tokens: int
    """Tokens of one hash of a request."""

    @classmethod
    def of(cls, config: KVCacheConfig, hash_tokens: int, *, caching: bool) -> "KvGroups":
        """Return the groups of a scheduler.

        Args:
            config: the scheduler's KV cache configuration.
            hash_tokens: tokens of one hash of a request.
            caching: whether prefix caching is on.
        """
        return cls(tuple(_group(group.kv_cache_spec) for group in config.kv_cache_groups), caching, hash_tokens)

    @property
    def main(self) -> int:
        """Number of the group whose blocks show how much of a context is cached: the first with full attention.

        It is 0 where no group has full attention.
        """
        return next((number for number, group in enumerate(self.groups) if group.whole), 0)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the main group."""
        return self.groups[self.main].block_tokens

    @property
    def prefixes_stay(self) -> bool:
        """Whether each beginning of a cached context can be used, and each hash of a request is that of one block.

        Otherwise a context is of use up to its end or not at all: what its windows and states need for a shorter
        beginning has been freed.
        """
        (first, *others) = self.groups
        return self.caching and not others and first.whole and first.block_tokens == self.hash_tokens

    def blocks_of(self, tokens: int) -> int:
        """Return about how many blocks a context takes in all groups together."""
        return sum(group.blocks_of(tokens) for group in self.groups)

    def tokens_in(self, blocks: int) -> int:
        """Return how many tokens of long contexts fit into blocks of the pool."""
        growing = sum(group.most_blocks is None for group in self.groups)
        return blocks * self.block_tokens // max(1, growing)

    def main_hashes(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return the hashes of a request's blocks in the main group.

        Args:
            hashes: the request's hashes.
        """
        if self.block_tokens == self.hash_tokens or self.block_tokens % self.hash_tokens:
            return hashes
        merged: Sequence[BlockHash] = BlockHashListWithBlockSize(list(hashes), self.hash_tokens, self.block_tokens)
        return merged

    def in_order(self, tables: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
        """Return the blocks of a context in the order of their tokens, without the place holders of freed ones.

        Args:
            tables: the block table of each group.
        """
        if len(tables) == 1:
            return [block for block in tables[0] if not block.is_null]
        placed = [
            ((number + 1) * group.block_tokens, block)
            for group, table in zip(self.groups, tables, strict=True)
            for number, block in enumerate(table)
            if not block.is_null
        ]
        return [block for _, block in sorted(placed, key=lambda pair: pair[0])]


def _group(spec: KVCacheSpec) -> Group:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    whole = isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec)
    return Group(spec.block_size, _most_blocks(spec), whole)


def _most_blocks(spec: Any) -> int | None:
    if isinstance(spec, SlidingWindowSpec):
        return int(-(-(spec.sliding_window - 1) // spec.block_size) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(-(-spec.attention_chunk_size // spec.block_size))
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "all":
        return 2 + int(spec.num_speculative_blocks)
    return None
