"""What policies decided at pauses, why, and how holds ended: counted over all that the stories still told."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.report.reading import Run

KINDS = ("held", "swapped", "released")
_DECISION = re.compile(r"(?P<kind>\w+)(?: [\d.]+s)?(?: \((?P<why>.*)\))?")
"""`held 0.250s (ttl)`, `released (no pin pays)`."""
REASONS = 8
"""Of a policy, those that are named."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Of one policy."""

    total: int
    kinds: tuple[tuple[str, float], ...]
    """Each kind's share, percent."""
    reasons: tuple[tuple[str, str, int, float], ...]
    """Kind, reason, how often, percent; the most frequent ones."""
    held_ended: tuple[tuple[str, float], ...]
    """How holds ended, percent: used by the next turn, or why not."""


def decided(runs: Sequence[Run]) -> Decided | None:
    """Of all runs of one policy at one load; None: nothing was told (stock vLLM decides nothing)."""
    counted: Counter[tuple[str, str]] = Counter()
    ends: Counter[str] = Counter()
    for run in runs:
        for program in run.programs:
            # Nothing was decided after a program's last turn.
            for turn in program.turns[:-1]:
                found = _DECISION.fullmatch(turn.decision)
                if found is not None:
                    counted[found["kind"], found["why"] or "the program went on at once"] += 1
            for pause, after in pairwise((*program.pauses, None)):
                if pause is not None and pause.phase == "held":
                    broken = after is not None and after.from_s == pause.to_s
                    ends[(after.why or after.phase) if after is not None and broken else "used"] += 1
    total = sum(counted.values())
    if not total:
        return None
    kinds = Counter[str]()
    for (kind, _), count in counted.items():
        kinds[kind] += count
    return Decided(
        total=total,
        kinds=tuple((kind, 100 * kinds[kind] / total) for kind in KINDS if kinds[kind]),
        reasons=tuple((kind, why, n, 100 * n / total) for (kind, why), n in counted.most_common(REASONS)),
        held_ended=tuple((how, 100 * n / sum(ends.values())) for how, n in ends.most_common()),
    )
