"""Continuum, written a second time from the paper (sections 4.2 to 4.4, 5.3), with nothing of `replicas.policies`.

Section 4.2 names the inequality of Maurer and Pontil (2009), of which this is theorem 4. Taken from
docs/papers/continuum.md, because the formula is lost in our copy of the text: the factor for turns is the number of
requests so far over the average.
"""

from math import log, sqrt

from replicas.policy import HoldView, PauseView, TurnView

DELTA, K, DEFAULT_S, BETA = 0.1, 5, 2.0, 1.0


def bound_s(seconds: list[float]) -> float:
    """mean + sqrt(2 V ln(2 / delta) / n) + 7 range ln(2 / delta) / (3 (n - 1)), with the sample variance V."""
    count = len(seconds)
    mean = sum(seconds) / count
    variance = sum((value - mean) ** 2 for value in seconds) / (count - 1)
    term = log(2 / DELTA)
    return mean + sqrt(2 * variance * term / count) + 7 * (max(seconds) - min(seconds)) * term / (3 * (count - 1))


def ttl_s(pause: PauseView, tool: list[float], everything: list[float]) -> float:
    """Section 4.3: the bound of the tool if it was seen K times, else of all tools, else a default; times the turns."""
    if len(tool) >= K:
        bound = bound_s(tool)
    elif len(everything) >= K:
        bound = bound_s(everything)
    else:
        bound = DEFAULT_S
    factor = pause.program.turns / pause.average_turns if pause.average_turns else 1.0
    return bound * BETA * factor


def before(first: TurnView, second: TurnView) -> bool:
    """Section 4.4: preempted, pinned, then the program that arrived first. False if they are equal."""
    for one, other in (
        (first.preempted, second.preempted),
        (first.pinned, second.pinned),
    ):
        if one != other:
            return one
    return first.program.arrived_s < second.program.arrived_s


def victim(holds: list[HoldView]) -> HoldView:
    """Section 5.3: the pin of the program that arrived last."""
    latest = holds[0]
    for hold in holds[1:]:
        if hold.program.arrived_s > latest.program.arrived_s:
            latest = hold
    return latest
