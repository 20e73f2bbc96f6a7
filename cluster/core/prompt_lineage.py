"""Finds the program of a completion by its prompt: it continues the program whose last prompt and answer it begins
with.

A prompt is hashed once, and looked up at the ends of its blocks. Only the beginning of an answer is kept and compared,
because clients may cut the rest. Programs that were sent the same prompt are distinguished by their answers.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

BLOCK_BYTES = 512
"""Length of a block of a prompt. A program is found by its whole blocks, and then by the bytes after them."""
ANSWER_BYTES = 64
"""Length of the beginning of an answer that is kept and compared."""
DIGEST_BYTES = 16
TOKEN = "I"
"""Type of an array of token ids, of 4 bytes each."""
ID_PREFIX = "auto-"
"""The beginning of the id of a program that named none."""

_SEVERAL = ("n", "best_of")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as bytes: UTF-8, or token ids."""

    data: bytes
    base: bytes
    """What all prompts of one tenant, model and kind have in common."""
    is_text: bool

    def keys(self) -> list[bytes]:
        """Return the digests of the first 0, 1, 2, ... whole blocks."""
        digest = hashlib.sha256(self.base)
        keys = [digest.digest()[:DIGEST_BYTES]]
        for start in range(0, len(self.data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            digest.update(self.data[start : start + BLOCK_BYTES])
            keys.append(digest.copy().digest()[:DIGEST_BYTES])
        return keys


def prompt_of(tenant: str, body: Mapping[str, Any]) -> Prompt | None:
    """Return the prompt of a completion. None: there is none or several, it is invalid, or it has several answers."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt or body.get("echo") or any(body.get(name) not in (None, 1) for name in _SEVERAL):
        return None
    is_text = isinstance(prompt, str)
    try:
        data = prompt.encode() if isinstance(prompt, str) else array(TOKEN, prompt).tobytes()
    except (TypeError, ValueError, OverflowError):  # vLLM rejects it
        return None
    return Prompt(data, repr((tenant, body.get("model"), is_text)).encode("utf-8", "replace"), is_text)


@dataclass(slots=True, eq=False)
class PromptProgram:
    """A program that is known by its last prompt and the beginning of its answer."""

    id: str = field(default_factory=lambda: ID_PREFIX + uuid4().hex)
    point: tuple[bytes, bytes] = (b"", b"")
    """The key of the last prompt's whole blocks, and the bytes after them."""
    is_text: bool = True
    answer: bytearray = field(default_factory=bytearray)
    """The beginning of the last answer. It is empty if the answer does not show it."""
    turns: int = 0
    active: int = 0
    """Number of its turns in flight."""

    @property
    def wants_answer(self) -> bool:
        """Whether `received` has an effect."""
        return len(self.answer) < ANSWER_BYTES

    def received(self, text: str, token_ids: Sequence[int]) -> None:
        """Keep the next part of the answer, if it belongs to the beginning. Text is kept without white space before it,
        which clients remove.
        """
        if not self.is_text:
            self.answer += array(TOKEN, token_ids).tobytes()
        else:
            self.answer += (text if self.answer else text.lstrip()).encode("utf-8", "replace")
        del self.answer[ANSWER_BYTES:]

    def is_followed_by(self, rest: bytes) -> bool:
        """Return whether a prompt that begins with the last one goes on with its answer."""
        if not self.is_text:
            return bool(self.answer) and rest.startswith(bytes(self.answer))
        answer = bytes(self.answer).rstrip()
        return bool(answer) and rest.lstrip().startswith(answer)


class PromptIndex:
    """The programs that one ingress knows by their prompts. The least recently used ones are forgotten.

    Args:
        max_programs: largest number of programs.
        max_holders: largest number of programs that are known by the same prompt. The oldest are dropped.
    """

    def __init__(self, max_programs: int, max_holders: int) -> None:
        self._max_programs = max_programs
        self._max_holders = max_holders
        self._programs: OrderedDict[str, PromptProgram] = OrderedDict()
        self._points: dict[tuple[bytes, bytes], list[PromptProgram]] = {}
        self._lengths: dict[bytes, Counter[int]] = {}
        """By key of whole blocks: how many points have a rest of each length."""

    def __len__(self) -> int:
        return len(self._programs)

    def turn(self, prompt: Prompt) -> tuple[PromptProgram, bool]:
        """Return the program of a prompt, and whether it was known. Its turn is in flight from now on."""
        keys = prompt.keys()
        found = self._continued(prompt, keys)
        program = found or PromptProgram(is_text=prompt.is_text)
        if found is None:
            self._programs[program.id] = program
            if len(self._programs) > self._max_programs:
                self._forget(next(iter(self._programs.values())))
        else:
            self._drop(program)
            self._programs.move_to_end(program.id)
        program.turns += 1
        program.active += 1
        program.answer.clear()
        program.point = keys[-1], prompt.data[(len(keys) - 1) * BLOCK_BYTES :]
        self._add(program)
        return program, found is not None

    def ended(self, program: PromptProgram, *, served: bool) -> None:
        """Record the end of a turn. ``served`` False: it failed before its first token."""
        program.active -= 1
        if not served and program.turns == 1 and self._programs.get(program.id) is program:
            self._forget(program)

    def check_integrity(self) -> None:
        """Check that points and programs agree.

        Raises:
            AssertionError: they do not.
        """
        assert len(self._programs) <= self._max_programs
        lengths: dict[bytes, Counter[int]] = {}
        for point, holders in self._points.items():
            assert holders, "a point without holders"
            assert all(self._programs.get(one.id) is one and one.point == point for one in holders)
            lengths.setdefault(point[0], Counter())[len(point[1])] += 1
        assert lengths == self._lengths, "lengths that no point has"

    def _continued(self, prompt: Prompt, keys: Sequence[bytes]) -> PromptProgram | None:
        """Return the program whose last prompt and answer the prompt begins with. The longest wins, then the oldest.

        The same prompt again is a retry if it was not the program's first. Otherwise it may be another sample.
        """
        for end, holders in self._known(prompt.data, keys):
            rest = prompt.data[end:]
            for program in holders:
                if not program.active and (program.is_followed_by(rest) if rest else program.turns > 1):
                    return program
        return None

    def _known(self, data: bytes, keys: Sequence[bytes]) -> Iterator[tuple[int, list[PromptProgram]]]:
        """Yield the known prompts that ``data`` begins with, the longest first: their length and their programs."""
        for place in range(len(keys) - 1, -1, -1):
            start, key = place * BLOCK_BYTES, keys[place]
            for length in sorted(self._lengths.get(key, ()), reverse=True):
                holders = self._points.get((key, data[start : start + length]))
                if holders is not None and start + length <= len(data):
                    yield start + length, holders

    def _forget(self, program: PromptProgram) -> None:
        del self._programs[program.id]
        self._drop(program)

    def _add(self, program: PromptProgram) -> None:
        key, rest = program.point
        holders = self._points.get(program.point)
        if holders is None:
            holders = self._points[program.point] = []
            self._lengths.setdefault(key, Counter())[len(rest)] += 1
        holders.append(program)
        if len(holders) > self._max_holders:
            del holders[0]

    def _drop(self, program: PromptProgram) -> None:
        key, rest = program.point
        holders = self._points.get(program.point, [])
        if program not in holders:
            return
        holders.remove(program)
        if holders:
            return
        del self._points[program.point]
        lengths = self._lengths[key]
        lengths[len(rest)] -= 1
        if not lengths[len(rest)]:
            del lengths[len(rest)]
        if not lengths:
            del self._lengths[key]
