"""What a turn is placed by: the turn, a replica that might take it, and what of the turn's prompt is missing there.

Frozen; scorers and filters see nothing else. Lengths in tokens, times in seconds.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.routing import PREFIX_BLOCK_TOKENS
from router.facts import Facts
from router.outlook import Expected

NO_NAMES: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn that is to be placed."""

    key: str
    name: int
    """Of its program in snapshots, see `cluster.routing.program_name`."""
    tenant: str
    prefix: tuple[int, ...]
    expected: Expected
    avoid: frozenset[str] = frozenset()
    home: str | None = None
    """Where its program lives, if it does."""
    home_tokens: int = 0
    """KV that its program had there when its last turn ended."""
    just_ended: bool = False
    """That was after the replica's newest snapshot."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica now: its snapshot, and what was sent there since."""

    replica: str
    model: str | None
    """None: it has not said."""
    draining: bool
    suspect: bool
    """It has failed a turn of late."""
    facts: Facts
    turns: float
    """Running, waiting, and on their way."""
    backlog_tokens: float
    """Of prompts that have to be computed before another's."""
    start_s: float
    """Until that is done, with what comes back from pauses meanwhile."""
    residual_s: float
    """Until the running turns have ended, in the mean."""
    step_s: float
    """An iteration as things are."""
    programs: float
    active: float
    """Of the programs that live here, those that run, wait, or come back within seconds."""
    active_step_s: float
    """An iteration in which they all take part."""
    refill_s: float
    """A program that pauses longer is not worth its memory."""
    occupied_tokens: float
    """Expected KV of the programs that live here."""
    late_tokens: float
    """Of that, growth of programs that pause for longer than their KV is kept for them: nobody waits for it."""
    bound_tokens: float
    """Of that, as much as is admitted."""
    residents: frozenset[int] = NO_NAMES
    on_device: frozenset[int] = NO_NAMES
    on_host: frozenset[int] = NO_NAMES
    prefixes: Container[int] = NO_NAMES
    """Prefix blocks that the replica says are cached there."""
    sent_prefixes: Container[int] = field(default=NO_NAMES)
    """Those that were sent there."""

    def shared_blocks(self, prefix: tuple[int, ...], guess: int = 0) -> int:
        """Blocks of a prompt's beginning that are likely cached here.

        Names are chained, and what is cached of a prompt is its beginning: so the longest is found by bisection, or at
        once where it is as long as on another replica, ``guess``.
        """
        told, sent = self.prefixes, self.sent_prefixes
        if not prefix or (prefix[0] not in told and prefix[0] not in sent):
            return 0
        there, missing = 1, len(prefix) + 1
        middle = min(guess, len(prefix)) if guess > 1 else (there + missing) // 2
        while missing - there > 1:
            if prefix[middle - 1] in told or prefix[middle - 1] in sent:
                there = middle
                middle = middle + 1 if middle == guess else (there + missing) // 2
            else:
                missing = middle
                middle = (there + missing) // 2
        return there

    def needs(self, expected: Expected) -> float:
        """KV of such a program in the working set here: all of it while it runs or its pause is short enough."""
        if expected.pause_s <= self.refill_s:
            return expected.context_tokens
        turn_s = expected.new_tokens * self.facts.token_s + expected.output_tokens * self.step_s
        return expected.context_tokens * (turn_s + self.refill_s) / (turn_s + expected.pause_s)

    def work_s(self, expected: Expected) -> float:
        """Seconds of this replica that such a program takes; weights, read for many at a time, are not counted."""
        facts = self.facts
        computed = expected.prompt_tokens + expected.later_turns * expected.new_tokens
        decode_s = facts.token_s + facts.sequence_s + expected.context_tokens * facts.context_s
        return computed * facts.token_s + expected.outputs * decode_s

    def has_room(self, expected: Expected, empty_share: float) -> bool:
        """May such a program be admitted? One larger than everything may where little else is."""
        needed = self.needs(expected)
        taken = self.occupied_tokens - self.late_tokens
        if taken + needed <= self.bound_tokens:
            return True
        return needed > (1 - empty_share) * self.bound_tokens and taken <= empty_share * self.bound_tokens


class Gap(NamedTuple):
    """What of a turn's prompt is not in a replica's device memory."""

    compute_tokens: float
    fetch_tokens: float
    """In its host tier."""
    shared_blocks: int = 0
    """Of the prompt's beginning, found there; 0 where all that the program had there counts."""

    def seconds(self, facts: Facts) -> float:
        """Until it is."""
        return self.compute_tokens * facts.token_s + self.fetch_tokens * facts.swap_token_s


def gap(turn: Arrival, candidate: Candidate, guess: int = 0) -> Gap:
    """What is missing. At home all that was there counts, elsewhere only what prompts have in common.

    ``guess``: blocks that are found at another replica.
    """
    prompt = turn.expected.prompt_tokens
    if turn.home == candidate.replica:
        known = min(turn.home_tokens, prompt)
        if turn.just_ended or turn.name in candidate.on_device:
            return Gap(prompt - known, 0.0)
        if turn.name in candidate.on_host:
            return Gap(prompt - known, known)
    elif turn.home is None and turn.name in candidate.residents:  # another ingress placed it
        known = round(max(0.0, prompt - turn.expected.new_tokens))
        if turn.name in candidate.on_device:
            return Gap(prompt - known, 0.0)
        if turn.name in candidate.on_host:
            return Gap(prompt - known, known)
    shared = candidate.shared_blocks(turn.prefix, guess)
    return Gap(max(0, prompt - shared * PREFIX_BLOCK_TOKENS), 0.0, shared)


@dataclass(frozen=True, slots=True)
class Sent:
    """What is known of a replica beside its snapshot: this ingress's own doing since."""

    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    programs: int = 0
    """That came, less those that left."""
    kv_tokens: float = 0.0
    """Expected of those, and growth expected of the programs that live there, less what left."""
    active_tokens: float = 0.0
    """The same, of that growth only what is expected within seconds."""
    late_tokens: float = 0.0
    """Of that growth, what is not expected within the replica's refill time."""


def candidate_of(
    replica: str,
    facts: Facts,
    sent: Sent,
    *,
    bound_tokens: float,
    model: str | None = None,
    draining: bool = False,
    suspect: bool = False,
    residents: frozenset[int] = NO_NAMES,
    on_device: frozenset[int] = NO_NAMES,
    on_host: frozenset[int] = NO_NAMES,
    prefixes: Container[int] = NO_NAMES,
    sent_prefixes: Container[int] = NO_NAMES,
) -> Candidate:
    """The replica as scorers see it."""
    costs = facts.costs
    turns = facts.running + facts.waiting + sent.turns
    backlog = facts.waiting_tokens + sent.prompt_tokens
    running_tokens = min(facts.kv_tokens, facts.running_tokens + sent.prompt_tokens)
    step_s = costs.decode_step_s(turns, running_tokens)
    start_s = backlog * costs.token_s
    start_s += _resumed_tokens(facts.resume_tokens, start_s) * costs.token_s

    programs = max(0.0, facts.programs + sent.programs)
    occupied = max(0.0, facts.working_set_tokens + sent.kv_tokens)
    active = max(0.0, facts.active_programs + sent.programs)
    active_tokens = max(0.0, facts.active_tokens + sent.active_tokens)
    return Candidate(
        replica=replica,
        model=model,
        draining=draining,
        suspect=suspect,
        facts=facts,
        turns=turns,
        backlog_tokens=backlog,
        start_s=start_s,
        residual_s=(facts.output_tokens + sent.output_tokens) / max(1.0, turns) * step_s,
        step_s=step_s,
        programs=programs,
        active=active,
        active_step_s=costs.decode_step_s(active, min(facts.kv_tokens, active_tokens)),
        refill_s=facts.kv_tokens * costs.token_s,
        occupied_tokens=occupied,
        late_tokens=sent.late_tokens,
        bound_tokens=bound_tokens,
        residents=residents,
        on_device=on_device,
        on_host=on_host,
        prefixes=prefixes,
        sent_prefixes=sent_prefixes,
    )


def _resumed_tokens(forecast: tuple[tuple[float, float], ...], within_s: float) -> float:
    """Tokens that those need computed who come back from their pauses by then; between two times in proportion."""
    before_s = before = 0.0
    for by_s, tokens in forecast:
        if by_s > within_s:
            return before + max(0.0, tokens - before) * (within_s - before_s) / (by_s - before_s)
        before_s, before = max(before_s, by_s), max(before, tokens)
    return before
