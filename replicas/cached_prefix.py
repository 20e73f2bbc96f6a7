"""What paused programs have left in the prefix cache: enough of each to find out later how much is still there.

A released program's blocks stay cached until somebody takes them, the last ones first, and vLLM reports none of it.
A few of their hashes, spread over the context, show where the cached part ends now.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from replicas.policy import Forecast

MARKS = 8
"""Hashes kept of a context: the answer is exact to an eighth of it."""

MAX_PREFIXES = 4096
"""Programs whose hashes a replica keeps."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A context that a pause began with."""

    marks: tuple[tuple[int, BlockHash], ...]
    """(tokens up to the end of a block, its hash), in the order of the context."""
    forecast: Forecast
    """Of the turn that the pause followed."""


class CachedPrefixes:
    """Prefixes by program key.

    Args:
        block_tokens: what a hash stands for.
        max_programs: of more, those that paused first are forgotten.
    """

    def __init__(self, block_tokens: int, max_programs: int = MAX_PREFIXES) -> None:
        self._block_tokens = block_tokens
        self._max_programs = max_programs
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def keep(self, key: str, hashes: Sequence[BlockHash], context_tokens: int, forecast: Forecast) -> None:
        """The program pauses; ``hashes`` are those of its whole blocks, of which the first ``context_tokens`` count."""
        whole = min(len(hashes), context_tokens // self._block_tokens)
        numbers = dict.fromkeys(whole * mark // MARKS for mark in range(1, MARKS + 1))
        marks = tuple((number * self._block_tokens, hashes[number - 1]) for number in numbers if number)
        self._prefixes[key] = CachedPrefix(marks, forecast)
        self._prefixes.move_to_end(key)
        if len(self._prefixes) > self._max_programs:
            self._prefixes.popitem(last=False)

    def forget(self, key: str) -> None:
        """The program has ended."""
        self._prefixes.pop(key, None)

    def get(self, key: str) -> CachedPrefix | None:
        """What it paused with last."""
        return self._prefixes.get(key)


def is_cached(pool: BlockPool) -> Callable[[BlockHash], bool]:
    """Whether the device still has a block, by its hash, whoever owns it."""
    find = pool.get_cached_block
    return lambda block_hash: find(block_hash, [0]) is not None


def leading_blocks(hashes: Sequence[BlockHash], cached: Callable[[BlockHash], bool]) -> int:
    """How many of a prompt's leading blocks are cached. Found by halves: they are evicted from the end."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if cached(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def cached_tokens(prefix: CachedPrefix | None, cached: Callable[[BlockHash], bool]) -> int:
    """Leading tokens of the context that are still cached, to an eighth of it."""
    if prefix is None or not prefix.marks or not cached(prefix.marks[0][1]):  # mostly it is all or nothing
        return 0
    tokens, last = prefix.marks[-1]
    if cached(last):
        return tokens
    return prefix.marks[leading_blocks([block_hash for _, block_hash in prefix.marks], cached) - 1][0]
