"""Computes a program's next prompt into its held context while its tools run, as far as it is known.

The replica sends the prompt of the program's next turn as far as it is known (`EarlyPrefill.extend`). In steps with
room, a part of it is computed as a request of the scheduler's own, which no policy or client sees. The request begins
and ends within one call of ``schedule``: vLLM finds the held blocks by their hashes, allocates the next ones, and the
hold takes them over (`EarlyPrefill.begin`, `EarlyPrefill.scheduled`). The request has one token more than is computed,
so that nothing is sampled.

The result is exact whatever was sent. The next turn finds blocks by the hashes of its own prompt. What does not match
is freed and counted as wasted.

Room (`spare_tokens`): nothing is computed while a turn waits or a prompt is being computed, and only memory that nobody
needs is used. Beside turns that generate, it may take DECODE_SHARE of the time of the steps. On an idle replica a
step is short, because a turn that arrives waits for its end.
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from replicas.hold_table import HoldTable
from replicas.policy import LoadView
from replicas.prefill_scheduling import scheduled_tokens, under_way
from replicas.rewritten_context import matching_blocks
from replicas.swapping import Swapping

PREFIX = "caesura-early-"
"""Prefix of the ids of these requests."""

DECODE_SHARE = 0.02
"""Share of the time of steps with turns that generate which early prefill may add to them."""
LONGEST_S = 0.010
"""Longest time in seconds that early prefill may add to one step, or that it may take in a step of its own. A block may
always be computed."""
LEAST_TOKENS = 64
"""Fewest tokens that are computed beside turns that generate, unless fewer are left or take longer than LONGEST_S. Each
part reads the context again."""
MAX_REWRITES = 1
"""Number of times in one pause that computed tokens may be replaced. After more, the output is not computed early."""


class EndReason(StrEnum):
    """Why the next prompt of a paused program is not computed early (any more)."""

    NOT_HELD = "not_held"
    """The program's KV is not held on this replica, or its context cannot be extended."""
    REWRITTEN = "rewritten"
    """The prompt does not begin with the held context, or the tool has replaced its earlier output."""
    NO_MEMORY = "no_memory"
    RENDERED_AGAIN = "rendered_again"
    """The chat template does not extend the context, so that the next prompt will be rendered again."""
    NO_ANSWER = "no_answer"
    """The scheduler did not answer in time."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for an answer in the model's context window."""
    NOT_REUSED = "not_reused"
    """A step computed nothing but tokens whose KV is held, because vLLM did not find all of the held context."""


def spare_tokens(load: LoadView, context_tokens: int, pending: int, credit_s: float, block_tokens: int) -> int:
    """Return how many tokens of a prompt this step may compute early. It is a multiple of a block.

    Args:
        load: the replica's load. It must have no prompts under way.
        context_tokens: tokens of the prompt whose KV is in memory.
        pending: tokens that could be computed, a multiple of a block.
        credit_s: seconds by which the step may become longer. It applies where turns run.
        block_tokens: tokens of a block.
    """

    def blocks_s(blocks: int) -> float:
        return added_s(load, context_tokens, blocks * block_tokens)

    if load.waiting:
        return 0
    # Running turns grow by a block each at most, before the next step can give the memory back.
    room = min(load.facts.max_tokens - load.running, load.free_tokens - (load.running + 1) * block_tokens, pending)
    most = max(0, room) // block_tokens
    longest = min(most, max(1, bisect_right(range(1, most + 1), LONGEST_S, key=blocks_s)))
    if not load.running:
        return longest * block_tokens
    blocks = min(longest, bisect_right(range(1, most + 1), credit_s, key=blocks_s))
    return blocks * block_tokens if blocks >= min(longest, LEAST_TOKENS // block_tokens or 1) else 0


def added_s(load: LoadView, context_tokens: int, tokens: int) -> float:
    """Return by how many seconds a step becomes longer with ``tokens`` of a prompt after its first ``context_tokens``.

    Without turns that run it is the time of the whole step.
    """
    cost = load.facts.cost
    before_s = cost.decode_step_s(load.running, load.running_tokens) if load.running else 0.0
    context = load.running_tokens + context_tokens + tokens
    pairs = load.running_tokens + tokens * (context_tokens + tokens / 2)
    return cost.step_s(load.running + tokens, context, load.running + 1, pairs) - before_s


@dataclass(slots=True)
class Extension:
    """The next prompt of a paused program, as far as it is known."""

    prompt: Request
    """Holds the tokens and their hashes. vLLM never gets it."""
    base_tokens: int
    """Tokens in full blocks of the context that was held at the pause."""
    computed_tokens: int
    """Leading tokens whose KV is held, in full blocks."""
    work_tokens: int = 0
    """Tokens that were computed for it."""
    rewrites: int = 0
    ended: EndReason | None = None


@dataclass(frozen=True, slots=True)
class SchedulerCalls:
    """The scheduler's functions that early prefill calls."""

    add: Callable[[Request], None]
    """Adds a request to vLLM's queue."""
    take: Callable[[Request, int], Sequence[KVCacheBlock]]
    """Takes references to this number of the first blocks of a request."""
    end: Callable[[str], None]
    """Ends the request with this id."""
    hold_changes: Callable[[str], None]
    """Is called with a program before its hold changes."""


class EarlyPrefill:
    """The early prefill of one scheduler.

    Args:
        enabled: whether held contexts can be extended: there is one prefix cache, whose hashes are those of blocks, and
            vLLM finds all full blocks of a held context.
        holds: the scheduler's holds.
        block_tokens: tokens of a block.
        max_tokens: the model's context window.
        swapping: the host tier, which stores what is computed.
        calls: the scheduler's functions that are needed.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        holds: HoldTable[KVCacheBlock],
        block_tokens: int,
        max_tokens: int,
        swapping: Swapping,
        calls: SchedulerCalls,
    ) -> None:
        self.enabled = enabled
        self._holds = holds
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self._swapping = swapping
        self._calls = calls
        self._paused: dict[str, Request] = {}
        """The last turn of each program that is held, by program key."""
        self._extensions: dict[str, Extension] = {}
        self._credit_s = 0.0
        self._numbers = itertools.count()
        self._begun: tuple[str, Request] | None = None
        self.request_ids: set[str] = set()
        """Ids of requests that vLLM has not freed yet."""
        self.used_tokens = self.wasted_tokens = 0
        """Tokens that were computed early and that a turn has used or not."""
        self.rewritten = 0
        """Number of pauses in which the next prompt does not extend the context and is computed all the same."""
        self.ends: Counter[EndReason] = Counter()

    # --- a pause ------------------------------------------------------------------------------------------------------

    def pauses(self, key: str, request: Request) -> None:
        """Remember the turn whose context is held from now on."""
        if self.enabled and not request.mm_features and request.prompt_embeds is None:
            self._paused[key] = request

    def extend(self, key: str, at: int, ids: Sequence[int], *, rewrites: bool = False) -> EndReason | None:
        """Set the tokens of the program's next prompt from position ``at`` on. The prompt is known up to their end.

        Args:
            key: the program's key.
            at: the number of tokens before them: of the context that was held, or of what was sent before.
            ids: the tokens.
            rewrites: whether the prompt may differ from the context that was held. The hold then has the tokens before
                the difference, and those that are computed after it.

        Returns:
            Why they will not be computed, or None.

        Raises:
            ValueError: nothing is known of the tokens before ``at``.
        """
        held, request = self._holds.get(key), self._paused.get(key)
        if held is None or request is None:
            self.ends[EndReason.NOT_HELD] += 1
            return EndReason.NOT_HELD
        extension = self._extensions.get(key)
        if extension is None:
            base = held.tokens // self._block_tokens * self._block_tokens
            extension = Extension(_prompt_of(request), base, base)
        elif extension.ended is not None:
            return extension.ended
        known = extension.prompt.num_tokens
        if not 0 <= at <= known:
            raise ValueError(f"at must be between 0 and {known}, not {at}")
        self._extensions[key] = extension
        same = self._replaced(extension, at, ids)
        if at + len(ids) >= self._max_tokens:
            return self._end(extension, EndReason.TOO_LONG)
        if same < extension.base_tokens:
            if not rewrites:
                return self._end(extension, EndReason.REWRITTEN)
            extension.base_tokens = extension.computed_tokens = same // self._block_tokens * self._block_tokens
            self.rewritten += 1
            return None
        if same < extension.computed_tokens:
            extension.computed_tokens = same // self._block_tokens * self._block_tokens
            extension.rewrites += 1
            if extension.rewrites > MAX_REWRITES:
                return self._end(extension, EndReason.REWRITTEN)
        return None

    def _replaced(self, extension: Extension, at: int, ids: Sequence[int]) -> int:
        """Replace the tokens from ``at`` on. Return how many leading tokens are as before."""
        prompt = extension.prompt
        before, new = prompt._all_token_ids[at:], list(ids)
        same = at + _common(before, new)
        if same == at + len(new) or at + len(new) >= self._max_tokens:  # an older message adds nothing
            return prompt.num_tokens if same == at + len(new) else same
        del prompt._all_token_ids[same:], prompt.block_hashes[same // self._block_tokens :]
        prompt._all_token_ids.extend(new[same - at :])
        prompt.update_block_hashes()
        return same

    def _end(self, extension: Extension, reason: EndReason) -> EndReason:
        extension.ended = reason
        self.ends[reason] += 1
        return reason

    def resumes(self, key: str, hashes: Sequence[BlockHash]) -> None:
        """Count what the program's next turn uses of the tokens that were computed. Its hold is still complete.

        Args:
            key: the program's key.
            hashes: hashes of the full blocks of the turn's prompt.
        """
        held, extension = self._holds.get(key), self._extensions.pop(key, None)
        self._paused.pop(key, None)
        if held is not None and extension is not None:
            matching = matching_blocks(held.blocks, hashes) * self._block_tokens
            used = max(0, min(matching, extension.computed_tokens) - extension.base_tokens)
            self.used_tokens += used
            self.wasted_tokens += max(0, extension.work_tokens - used)

    def trimmed(self, key: str, tokens: int) -> None:
        """End the early prefill of a program of whose hold only the first ``tokens`` stay: memory is short."""
        if (extension := self._extensions.get(key)) is not None:
            extension.computed_tokens = min(extension.computed_tokens, tokens)
            if extension.ended is None:
                self._end(extension, EndReason.NO_MEMORY)

    def forget(self, key: str) -> None:
        """Forget a program whose hold ends. What was computed for a turn that has not come is wasted."""
        self._paused.pop(key, None)
        if (extension := self._extensions.pop(key, None)) is not None:
            self.wasted_tokens += extension.work_tokens

    def numbers(self) -> dict[str, Any]:
        """Return the tokens that are to be computed, and the totals, as plain values."""
        return {
            "early_prefill_pending": sum(map(self._pending, self._extensions.values())),
            "early_prefill_tokens": {"used": self.used_tokens, "wasted": self.wasted_tokens},
            "early_prefill_rewritten": self.rewritten,
            "early_prefill_ends": {str(reason): self.ends[reason] for reason in EndReason},
        }

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there are tokens that could be computed."""
        return any(self._pending(extension) for extension in self._extensions.values())

    def _pending(self, extension: Extension) -> int:
        if extension.ended is not None:
            return 0
        known: int = extension.prompt.num_tokens
        return known // self._block_tokens * self._block_tokens - extension.computed_tokens

    def begin(self, load: LoadView, running: Sequence[Request]) -> int:
        """Add a request to vLLM's queue before a step, if there is room for it.

        Return the tokens of the step, those of the running turns included, or 0 if there is no room. With more, the
        step would compute the request's last token.
        """
        if not self._extensions or under_way(running):
            return 0
        if load.running:
            self._credit_s += DECODE_SHARE * load.iteration_s
        for key, extension in self._extensions.items():
            if pending := self._pending(extension):
                tokens = self._add(load, key, extension, pending)
                return tokens and tokens + sum(map(scheduled_tokens, running))
        return 0

    def _add(self, load: LoadView, key: str, extension: Extension, pending: int) -> int:
        done = extension.computed_tokens
        self._credit_s = min(self._credit_s, max(LONGEST_S, added_s(load, done, self._block_tokens)))
        tokens = spare_tokens(load, done, pending, self._credit_s, self._block_tokens)
        if not tokens:
            if not load.running and not load.waiting:
                self._end(extension, EndReason.NO_MEMORY)
            return 0
        if load.running:
            self._credit_s -= added_s(load, done, tokens)
        prompt, end = extension.prompt, done + tokens
        ids = prompt._all_token_ids[: end + 1]
        # With one more token than is computed, the prompt is never complete, and no token is sampled.
        request = _bare(f"{PREFIX}{next(self._numbers)}", ids if len(ids) > end else [*ids, ids[-1]], prompt)
        request.block_hashes = prompt.block_hashes[: end // self._block_tokens]
        self._begun = (key, request)
        self.request_ids.add(request.request_id)
        self._calls.add(request)
        self._swapping.extends(request, key)
        return tokens

    def scheduled(self, output: SchedulerOutput) -> None:
        """Let the hold take over what the step computes, and end the request."""
        if self._begun is None:
            return
        (key, request), self._begun = self._begun, None
        extension, held = self._extensions.get(key), self._holds.get(key)
        tokens = output.num_scheduled_tokens.get(request.request_id, 0)
        if extension is None or held is None:  # the hold was evicted in this step
            self.wasted_tokens += tokens
        elif not tokens:
            if len(output.num_scheduled_tokens) == 0:
                self._end(extension, EndReason.NO_MEMORY)
        else:
            extension.work_tokens += tokens
            blocks = request.num_computed_tokens // self._block_tokens
            if (computed := blocks * self._block_tokens) > extension.computed_tokens:
                extension.computed_tokens = computed
                self._calls.hold_changes(key)
                self._holds.replace(key, self._calls.take(request, blocks), computed)
            else:  # the next steps would do the same
                self._end(extension, EndReason.NOT_REUSED)
        self._swapping.ends(request)
        self._calls.end(request.request_id)

    def owner_of(self, request_id: str) -> str | None:
        """Return the program for which a request of this step computes, or None."""
        return self._begun[0] if self._begun is not None and self._begun[1].request_id == request_id else None

    def freed(self, request: Request) -> None:
        """Forget a request that vLLM has freed."""
        self.request_ids.discard(request.request_id)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])


def _prompt_of(turn: Request) -> Request:
    """Return a request with the context of a turn that has ended, which can be extended."""
    prompt = _bare(f"{PREFIX}prompt", list(turn.all_token_ids), turn)
    prompt.block_hashes = list(turn.block_hashes)
    prompt._block_hasher = turn._block_hasher
    return prompt


def _bare(request_id: str, ids: list[int], like: Request) -> Request:
    """Return a request without hashes that shares what the hashes of ``like`` depend on beside the tokens."""
    return Request(
        request_id,
        ids,
        SamplingParams(max_tokens=1),
        None,
        lora_request=like.lora_request,
        cache_salt=like.cache_salt,
    )
