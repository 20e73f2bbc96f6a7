"""Estimates how much of a paused program's context the prefix cache still has.

The blocks of a released program stay cached until they are evicted, the last ones first, and vLLM does not report the
evictions. This module keeps a few block hashes of each context, spread over its length. They show where the cached part
ends now.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from replicas.policy import Forecast

MARKS = 8
"""Number of hashes that are kept of a context. The result is exact to an eighth of the context."""

MAX_PREFIXES = 4096
"""Largest number of programs whose hashes a replica keeps."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Some block hashes of the context with which a program paused."""

    marks: tuple[tuple[int, BlockHash], ...]
    """Pairs (tokens up to the end of a block, hash of this block), in the order of the context."""
    forecast: Forecast
    """The forecast of the turn that the pause followed."""


class CachedPrefixes:
    """The cached prefixes of paused programs, by program key.

    Args:
        block_tokens: tokens of one block, which one hash identifies.
        max_programs: largest number of programs. Those that paused first are dropped when there are more.
    """

    def __init__(self, block_tokens: int, max_programs: int = MAX_PREFIXES) -> None:
        self._block_tokens = block_tokens
        self._max_programs = max_programs
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def keep(self, key: str, hashes: Sequence[BlockHash], context_tokens: int, forecast: Forecast) -> None:
        """Keep hashes of the context of a program that pauses.

        Args:
            key: the program's key.
            hashes: hashes of its full blocks.
            context_tokens: length of the context, in tokens. Hashes of later blocks are ignored.
            forecast: the forecast of the turn that the pause follows.
        """
        whole = min(len(hashes), context_tokens // self._block_tokens)
        numbers = dict.fromkeys(whole * mark // MARKS for mark in range(1, MARKS + 1))
        marks = tuple((number * self._block_tokens, hashes[number - 1]) for number in numbers if number)
        self._prefixes[key] = CachedPrefix(marks, forecast)
        self._prefixes.move_to_end(key)
        if len(self._prefixes) > self._max_programs:
            self._prefixes.popitem(last=False)

    def forget(self, key: str) -> None:
        """Drop the hashes of a program that has ended."""
        self._prefixes.pop(key, None)

    def get(self, key: str) -> CachedPrefix | None:
        """Return the prefix of the program's last pause, or None if there is none."""
        return self._prefixes.get(key)


def is_cached(pool: BlockPool, group: int = 0) -> Callable[[BlockHash], bool]:
    """Return a function that shows whether the device has the block with a hash, whoever owns it.

    Args:
        pool: the blocks.
        group: number of the KV cache group that the hashes are of.
    """
    find, groups = pool.get_cached_block, [group]
    return lambda block_hash: find(block_hash, groups) is not None


def leading_blocks(hashes: Sequence[BlockHash], cached: Callable[[BlockHash], bool]) -> int:
    """Return how many of a prompt's leading blocks are cached.

    The search is a bisection, because blocks are evicted from the end of the context.
    """
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if cached(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def cached_tokens(prefix: CachedPrefix | None, cached: Callable[[BlockHash], bool]) -> int:
    """Return how many leading tokens of the context are still cached, exact to an eighth of the context.

    0 means that nothing is cached or that ``prefix`` is None.
    """
    if prefix is None or not prefix.marks or not cached(prefix.marks[0][1]):  # mostly all or none
        return 0
    tokens, last = prefix.marks[-1]
    if cached(last):
        return tokens
    return prefix.marks[leading_blocks([block_hash for _, block_hash in prefix.marks], cached) - 1][0]
