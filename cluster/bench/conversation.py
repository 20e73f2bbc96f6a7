"""The token ids of one replayed program: what was really sent and really generated, and random ids for the rest."""

from zlib import crc32

import numpy as np

from cluster.bench.workload import PlannedProgram, PlannedTurn

TOKEN_IDS = range(32, 256)
"""Ids that every byte-level or sentence-piece vocabulary has, past the special ones that many put first."""


class Conversation:
    """Builds each turn's prompt so that it extends the ids of the turn before exactly.

    Programs of the same ``prefix_group`` start with the same ids under the same ``seed``.
    """

    def __init__(self, program: PlannedProgram, seed: tuple[int, ...]) -> None:
        self._rng = np.random.default_rng(seed)
        self._prefix: list[int] = []
        if program.prefix_group is not None:
            group = np.random.default_rng([seed[0], crc32(program.prefix_group.encode())])
            self._prefix = _random_ids(group, program.prefix_tokens)
        self._ids: list[int] = []
        self._known = 0

    def prompt(self, turn: PlannedTurn) -> tuple[list[int], int]:
        """The ids to send, and how many of them, from the start, the turn before had sent or generated."""
        if not self._ids or turn.reset:
            self._known = len(self._prefix[: turn.fresh_tokens]) if self._ids else 0
            self._ids = self._prefix[: turn.fresh_tokens]
            self._ids = self._ids + _random_ids(self._rng, turn.fresh_tokens - len(self._ids))
        else:
            self._ids = self._ids + _random_ids(self._rng, turn.fresh_tokens)
        return self._ids, self._known

    def answered(self, generated: list[int], kept_tokens: int) -> None:
        """Take over the last ``kept_tokens`` of what was generated: what was hidden came before them."""
        sent = len(self._ids)
        self._ids = self._ids + generated[len(generated) - kept_tokens :]
        self._known = len(self._ids) if kept_tokens == len(generated) else sent


def _random_ids(rng: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = rng.integers(TOKEN_IDS.start, TOKEN_IDS.stop, size=count).tolist()
    return ids
