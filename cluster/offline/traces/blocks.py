"""Blocks of a prompt, by ids: two prompts that begin with the same ids begin with the same tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence

from cluster.core.recorded_turn import RecordedProgram, RecordedTurn


class BlockIds:
    """Gives ids to the blocks of prompts, for formats that have ``hash_ids``.

    An id stands for ``block_tokens`` tokens at one place after the same prefix. The last block of a prompt may be
    partly filled: it gets another id in the next turn, which fills it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._groups: dict[str, list[int]] = {}
        self._next = 0

    def shared_blocks(self, program: RecordedProgram, turn: RecordedTurn) -> int:
        """Return how many whole blocks at the start of ``turn`` belong to the program's shared prefix."""
        prefix = program.shared_prefix
        shared = (prefix.tokens or 0) if prefix else 0
        return min(shared, turn.context_tokens) // self._block_tokens

    def start(self, program: RecordedProgram, turn: RecordedTurn) -> list[int]:
        """Return the ids of a prompt that continues no other: the shared prefix, and blocks of its own."""
        shared = self.shared_blocks(program, turn)
        ids: list[int] = []
        if program.shared_prefix is not None:
            group = self._groups.setdefault(program.shared_prefix.group, [])
            group += self._new(shared - len(group))
            ids = group[:shared]
        return ids + self._new(self._blocks(turn) - len(ids))

    def continued(self, ids: Sequence[int], before: RecordedTurn, turn: RecordedTurn) -> list[int]:
        """Return the ids of the prompt after ``before``, whose prompt has ``ids``."""
        same = list(ids[: before.context_tokens // self._block_tokens])
        return same + self._new(self._blocks(turn) - len(same))

    def _blocks(self, turn: RecordedTurn) -> int:
        return -(-turn.context_tokens // self._block_tokens)

    def _new(self, count: int) -> list[int]:
        first = self._next
        self._next += max(0, count)
        return list(range(first, self._next))


def common_prefixes(prompts: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return by the first id the prefix of which the prompts that begin with this id share the most blocks in all.

    A prompt that goes on differently within the prefix does not have it. A first id of a single prompt is left out.
    """
    by_first: dict[int, list[Sequence[int]]] = {}
    for ids in prompts:
        if ids:
            by_first.setdefault(ids[0], []).append(ids)
    return {first: _most_shared(having) for first, having in by_first.items() if len(having) > 1}


def _most_shared(having: Sequence[Sequence[int]]) -> tuple[int, ...]:
    path: list[int] = []
    most, length = 0, 0
    while True:
        following = Counter(ids[len(path)] for ids in having if len(ids) > len(path))
        if not following or max(following.values()) < 2:
            return tuple(path[:length])
        block, count = following.most_common(1)[0]
        having = [ids for ids in having if len(ids) > len(path) and ids[len(path)] == block]
        path.append(block)
        if (count - 1) * len(path) > most:
            most, length = (count - 1) * len(path), len(path)


def shared_prefix(
    ids: Sequence[int], common: Mapping[int, tuple[int, ...]], block_tokens: int
) -> dict[str, str | int] | None:
    """Return the fields of a program's shared prefix, which are the group and its tokens; None if it has none."""
    prefix = common.get(ids[0], ()) if ids else ()
    if not prefix or tuple(ids[: len(prefix)]) != prefix:
        return None
    return {"group": str(ids[0]), "tokens": len(prefix) * block_tokens}


def other_prefixes(prompts: Sequence[Sequence[int]], common: Mapping[int, tuple[int, ...]]) -> int:
    """Return how many prompts have blocks of an earlier prompt beyond the prefix of `shared_prefix`."""
    seen: set[int] = set()
    others = 0
    for ids in prompts:
        prefix = common.get(ids[0], ()) if ids else ()
        own = ids[len(prefix) :] if tuple(ids[: len(prefix)]) == prefix else ids
        others += bool(own) and own[0] in seen
        seen.update(ids)
    return others
