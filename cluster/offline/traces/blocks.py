"""Blocks of a prompt, by ids: two prompts that begin with the same ids begin with the same tokens."""

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


def common_prefixes(prompts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return by the first id how many ids all prompts that begin with it have in common.

    A first id of a single prompt is left out: nothing is shared.
    """
    common: dict[int, list[int]] = {}
    several: set[int] = set()
    for ids in prompts:
        if not ids:
            continue
        first = ids[0]
        if first not in common:
            common[first] = list(ids)
            continue
        several.add(first)
        known = common[first]
        same = next((n for n, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), min(len(known), len(ids)))
        del known[same:]
    return {first: len(ids) for first, ids in common.items() if first in several}


def longer_shared(prompts: Sequence[Sequence[int]], common: Mapping[int, int]) -> int:
    """Return how many prompts share more ids with an earlier prompt than `common_prefixes` found for all."""
    seen: set[int] = set()
    longer = 0
    for ids in prompts:
        own = ids[common.get(ids[0], 0) :] if ids else ids
        longer += bool(own) and own[0] in seen
        seen.update(own)
    return longer
