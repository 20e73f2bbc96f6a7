"""What a program has used in a day on one replica: turns, tokens and seconds. Replicas write it, ingresses read it."""

import msgspec

OTHER_PROGRAMS = "*"
"""The program of a tenant's usage that has no row of its own, because the day has too many programs."""


class ProgramUsage(msgspec.Struct, array_like=True):
    """The usage of a program, or of a tenant's requests that belong to no program.

    Seconds are of whole replicas, of all GPUs of a replica together. ``prefill_s`` and ``decode_s`` of all programs
    add up to the time in which the replicas computed.
    """

    tenant: str
    program: str
    """Empty: requests that belong to no program."""
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    recomputed_s: float = 0.0
    """The part of ``prefill_s`` for tokens that had been computed before."""
    held_s: float = 0.0
    """Held KV: its share of the memory times the seconds."""
    caused_s: float = 0.0
    """``recomputed_s`` of other programs whose KV was evicted for this one."""

    def add(self, other: "ProgramUsage") -> None:
        """Add the usage on another replica."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


SUMS = ProgramUsage.__struct_fields__[2:]
"""Names of the fields that are sums."""


class DayUsage(msgspec.Struct, array_like=True):
    """The whole usage of a program in a day on one replica so far. A later one with the same number replaces it."""

    number: int
    """Unique among those of one replica."""
    day: str
    """The day in UTC on which the turns ended, as YYYY-MM-DD."""
    usage: ProgramUsage
