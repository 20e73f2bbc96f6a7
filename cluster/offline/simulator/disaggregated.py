"""Disaggregated prefill: some simulated replicas only compute prompts, whose KV then moves to the program's replica.

The router places programs on the other replicas, as if the prefill replicas did not exist. A turn of which its replica
lacks more than a number of tokens goes to a prefill replica first. It computes the prompt, and the turn begins on its
own replica when the KV has arrived there. All other turns begin there at once: short prompts of tool results do not
move.

The KV of a prompt is sent after the last token is computed. A replica sends one prompt after the other, and receives
as many as come. What arrives is in the prefix cache of the program's replica, from which it may be evicted before the
turn is admitted. It is lost for blocks for which there is no free memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.offline.simulator.routing import SimulatedTurn
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import chained_hashes
from replicas.virtual_replica import VirtualReplica, VirtualTurn

BITS = 8
GIGA = 1e9
PREFIX = "prefill-"
"""Prefix of the ids of the requests that compute prompts."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """How prompts are computed elsewhere."""

    replicas: int = 0
    """Number of replicas, the first ones, that only compute prompts. 0: each replica computes its own."""
    above_tokens: int = 2048
    """A prompt is computed by them if its replica lacks more tokens of it."""
    network_gbit_s: float = 200.0
    """Gigabits per second at which a replica sends KV."""


class PrefillPool:
    """The replicas that only compute prompts.

    Args:
        replicas: all replicas; the first ones compute prompts.
        how: which prompts they compute, and how fast KV moves.
    """

    def __init__(self, replicas: Sequence[VirtualReplica], how: Disaggregation) -> None:
        self._replicas = replicas
        self._how = how
        self._block_tokens = replicas[0].engine.shape.block_size
        self._ahead = [0] * how.replicas
        """Tokens of the prompts that each prefill replica computes."""
        self._free_at_s = [0.0] * how.replicas
        """Time at which each has sent what it sends."""
        self.prompts = 0
        """Number of prompts that were computed here."""
        self.sent_tokens = 0
        """Tokens whose KV was sent."""

    def takes(self, turn: SimulatedTurn, home: int) -> int | None:
        """Return the prefill replica that computes the prompt of a turn, or None if its own one does."""
        if len(turn.prompt) - self._there(turn, home) <= self._how.above_tokens:
            return None
        return min(range(len(self._ahead)), key=self._ahead.__getitem__)

    def _there(self, turn: SimulatedTurn, home: int) -> int:
        """Return how many leading tokens of the prompt its own replica has, on the device or on the host."""
        engine = self._replicas[home].engine
        cached = engine.cached_blocks(chained_hashes(turn.prompt, self._block_tokens)) * self._block_tokens
        scheduler = engine.scheduler
        if not isinstance(scheduler, AgentScheduler):
            return cached
        tiers = scheduler.swapping
        return max(cached, tiers.tokens_of(turn.program), tiers.disk_tokens_of(turn.program))

    def begin(self, turn: SimulatedTurn, index: int, known_tokens: int) -> VirtualTurn:
        """Submit the prompt to a prefill replica. It is a program of one turn there, which generates one token."""
        self.prompts += 1
        self._ahead[index] += len(turn.prompt)
        identity = replace(turn.identity, last_turn=True)
        return self._replicas[index].submit(f"{PREFIX}{turn.turn_id}", turn.prompt, 1, identity, known_tokens)

    def ended(self, turn: SimulatedTurn, index: int, home: int, now_s: float) -> float:
        """Begin to send the prompt's KV. Return the time at which it has arrived."""
        self._ahead[index] -= len(turn.prompt)
        tokens = max(0, len(turn.prompt) - self._there(turn, home))
        self.sent_tokens += tokens
        seconds = tokens * self._replicas[home].cost.kv_bytes_per_token * BITS / (self._how.network_gbit_s * GIGA)
        self._free_at_s[index] = max(now_s, self._free_at_s[index]) + seconds
        return self._free_at_s[index]

    def arrived(self, turn: SimulatedTurn, home: int) -> None:
        """Put the KV into the prefix cache of the program's replica."""
        self._replicas[home].engine.fill_cache(turn.prompt, len(turn.prompt) - 1)
