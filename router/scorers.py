"""Scorers: each answers how many seconds are lost, for one reason, if a turn's program lives on a replica.

Their sum, weighted, is what placement makes least. What is lost on every replica alike need not be counted.
"""

from typing import Protocol

from router.candidate import Arrival, Candidate, Gap


class Scorer(Protocol):
    """How many seconds are lost there? Finite, never below 0; the same for the same arguments."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """``gap``: what of the turn's prompt is missing on the replica."""
        ...


class Start:
    """Until the turn starts: prompts before it, those that come back from pauses, and memory that has to be freed."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """The backlog's time, and where memory is short the part of the running turns that has to end first."""
        facts = candidate.facts
        short = gap.compute_tokens + gap.fetch_tokens + candidate.backlog_tokens - facts.free_tokens
        if short <= 0 or facts.running_tokens <= 0:
            return candidate.start_s
        return candidate.start_s + candidate.residual_s * min(1.0, short / facts.running_tokens)


class Missing:
    """What is not there: computed, or fetched from the replica's host tier."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """Of the turn's prompt."""
        return gap.seconds(candidate.facts)


class Pace:
    """Tokens, one an iteration: the program's own, and those of the others, whose iterations it makes longer.

    In an iteration take part all that run, wait, or come back within seconds. Today's would mislead: a replica whose
    memory is full runs few turns, and looks fast for it. So would one of all that live there: who pauses for minutes
    makes nobody slow. What the others lose is what makes long contexts live where few have to wait for their reading.
    """

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """Own decodes times the iteration's length, and times what the program adds to it for each of the others."""
        own_s = candidate.facts.sequence_s + turn.expected.context_tokens * candidate.facts.context_s
        if turn.home == candidate.replica:  # which is one of the programs that live there
            others, step_s = max(0.0, candidate.active - 1), candidate.active_step_s
        else:
            others, step_s = candidate.active, candidate.active_step_s + own_s
        return turn.expected.outputs * (step_s + others * own_s)


class Memory:
    """What will have been evicted when it comes back, if more lives there than memory takes."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """At each later turn that part of its context, from the host tier as far as that reaches."""
        expected, facts = turn.expected, candidate.facts
        needed = 0.0 if turn.home == candidate.replica else candidate.needs(expected)
        wanted = candidate.occupied_tokens + needed
        over = wanted - facts.kv_tokens
        if over <= 0:
            return 0.0
        fetched = min(over, facts.host_tokens) / wanted
        computed = max(0.0, over - facts.host_tokens) / wanted
        token_s = fetched * 2 * facts.swap_token_s + computed * facts.token_s
        return expected.later_turns * expected.context_tokens * token_s
