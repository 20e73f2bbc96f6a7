"""Which beginnings of prompts are likely cached on a replica, as block names that the router can compare.

Blocks that several programs began with are what is worth knowing: system prompts and tool definitions. They come first
and are dropped last; what only one program has begun with takes the room that they leave, since the next program with
the same beginning may come at any time. (All blocks in one line would not do: a few programs with long prompts of their
own would push out every system prompt.)
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, islice

from cluster.routing import MAX_PREFIXES, pack_blocks, prefix_blocks

MAX_KEYS = 8192
"""Programs that are remembered, so that a later turn of one does not count as another program's."""


class PrefixMemory:
    """Fed with the prompts that a replica serves, as text or as token ids; whoever asks names them alike. Bounded."""

    def __init__(self, max_blocks: int = MAX_PREFIXES) -> None:
        self._max_blocks = max_blocks
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._once: OrderedDict[int, None] = OrderedDict()
        self._keys: OrderedDict[str, None] = OrderedDict()

    def serve(self, key: str | None, prompt: Sequence[int] | bytes, salt: str = "") -> None:
        """A turn of a program (None: of none) is served here. Of a program's later turns nothing is learnt.

        ``prompt`` and ``salt``: as for `prefix_blocks`.
        """
        if key is not None:
            known = key in self._keys
            self._keys[key] = None
            self._keys.move_to_end(key)
            if known:
                return
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        # Last block first: then the end of a prompt is dropped before its beginning, without which it says nothing.
        for block in reversed(prefix_blocks(prompt, salt)):
            if block in self._once or block in self._shared:
                self._once.pop(block, None)
                self._touch(self._shared, block)
            else:
                self._touch(self._once, block)

    def packed(self) -> bytes:
        """For `ReplicaSnapshot.prefixes`: blocks of several programs first, those used last first."""
        return pack_blocks(islice(chain(reversed(self._shared), reversed(self._once)), self._max_blocks))

    def _touch(self, blocks: OrderedDict[int, None], block: int) -> None:
        blocks[block] = None
        blocks.move_to_end(block)
        if len(blocks) > self._max_blocks:
            blocks.popitem(last=False)
