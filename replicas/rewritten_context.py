"""Finds what of a paused program's context its next prompt has replaced, and learns which outputs return in prompts.

A client that compacts its history keeps the head and replaces the rest. A chat template, or a client, that drops
reasoning makes the next prompt differ from the context where the last output begins. The KV of what is replaced is of
no use to the program. It uses these names of vLLM 0.29: KVCacheBlock.block_hash, get_block_hash.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_block_hash
from vllm.v1.request import Request

MAX_PROGRAMS = 4096
"""Largest number of programs of which it is known whether their outputs return."""


def computed_tokens(request: Request) -> int:
    """Return how many tokens of a turn that has ended have KV."""
    # The last token was sampled but not computed; an asynchronous engine counts it early.
    return int(min(request.num_computed_tokens, request.num_tokens - 1))


def matching_blocks(blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash]) -> int:
    """Return how many leading blocks of a held context the next prompt can use.

    Args:
        blocks: the held blocks, in the order of their tokens. A block that is not full has no hash.
        hashes: hashes of the prompt's full blocks.
    """
    for number, block in enumerate(blocks):
        if block.block_hash is None:
            return len(blocks)
        if number >= len(hashes) or get_block_hash(block.block_hash) != hashes[number]:
            return number
    return len(blocks)


@dataclass(slots=True)
class _Pause:
    answers: bool
    """Whether a user answers the turn. Otherwise a tool does."""
    block: int
    """Number of the block in which the turn's output begins."""
    before: BlockHash
    """Hash of the block before it, the last one that only has tokens of the prompt."""
    begin: BlockHash | None
    """Hash of the block itself; None: it is not full."""


class ReturningOutputs:
    """Whether the next prompts of a program contain the outputs of its turns. It is learnt at each resume.

    Templates that drop reasoning often do so only when a user answers, so that pauses for users and for tools are
    told apart.

    Args:
        block_tokens: tokens of one block.
        max_programs: largest number of programs. Those that paused first are dropped when there are more.
    """

    def __init__(self, block_tokens: int, max_programs: int = MAX_PROGRAMS) -> None:
        self._block_tokens = block_tokens
        self._max_programs = max_programs
        self._pauses: OrderedDict[str, _Pause | None] = OrderedDict()
        self._dropped: dict[str, set[bool]] = {}

    def __len__(self) -> int:
        return len(self._pauses)

    def pauses(
        self, key: str, hashes: Sequence[BlockHash], prompt_tokens: int, context_tokens: int, *, user_answers: bool
    ) -> int:
        """Record a pause. Return how many leading tokens of the context the next prompt is expected to contain.

        Args:
            key: the program's key.
            hashes: hashes of the full blocks of the context.
            prompt_tokens: tokens of the turn's prompt.
            context_tokens: tokens of the context, which are the prompt and the output.
            user_answers: whether the pause waits for the user, and not for a tool.
        """
        block = prompt_tokens // self._block_tokens
        whole = min(len(hashes), context_tokens // self._block_tokens)
        known = 0 < block <= whole
        begin = hashes[block] if block < whole else None
        self._pauses[key] = _Pause(user_answers, block, hashes[block - 1], begin) if known else None
        self._pauses.move_to_end(key)
        if len(self._pauses) > self._max_programs:
            oldest, _ = self._pauses.popitem(last=False)
            self._dropped.pop(oldest, None)
        if known and user_answers in self._dropped.get(key, ()):
            return min(context_tokens, block * self._block_tokens)
        return context_tokens

    def resumes(self, key: str, hashes: Sequence[BlockHash]) -> bool:
        """Learn from the next prompt. Return whether it contains the last one, as far as is known.

        Args:
            key: the program's key.
            hashes: hashes of the prompt's full blocks.
        """
        pause = self._pauses.get(key)
        if pause is None:
            return True
        if len(hashes) < pause.block or hashes[pause.block - 1] != pause.before:
            return False
        if pause.begin is not None and len(hashes) > pause.block:
            dropped = self._dropped.setdefault(key, set())
            if hashes[pause.block] == pause.begin:
                dropped.discard(pause.answers)
            else:
                dropped.add(pause.answers)
        return True

    def rehashed(self) -> None:
        """Forget the hashes of all pauses, since the same tokens have other hashes from now on."""
        self._pauses.clear()

    def forget(self, key: str) -> None:
        """Forget a program that has ended."""
        self._pauses.pop(key, None)
        self._dropped.pop(key, None)
