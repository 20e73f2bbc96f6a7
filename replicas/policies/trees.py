"""What the policy `caesura` makes of a tree of programs: its work, the way through a program, and when children end."""

from collections.abc import Callable
from math import exp

from replicas.policy import LoadView, TurnView, Work


def work_s(work: Work, load: LoadView) -> float:
    """Return the GPU seconds of some work: prompts, shares of decode iterations, and the reading of KV."""
    cost, turns = load.facts.cost, load.running + 1
    decode_s = cost.decode_step_s(turns) / turns
    return work.missing_tokens * cost.token_s + work.output_tokens * decode_s + work.output_contexts * cost.context_s


def way_s(turn: TurnView, prefill_s: float, later_outputs: float) -> float:
    """Return the seconds until the turn's program ends if it never waits: its turns and pauses one after the other.

    Args:
        turn: a turn of a tree.
        prefill_s: seconds of its prompt.
        later_outputs: tokens that the later turns generate.
    """
    forecast, load = turn.forecast, turn.load
    output = max(0.0, forecast.output_tokens - turn.generated_tokens)
    computed_s = max(0.0, forecast.later_tokens - later_outputs) * load.facts.cost.token_s
    pauses_s = max(0.0, forecast.later_turns) * max(0.0, forecast.pause_s)
    return prefill_s + (output + later_outputs) * load.joined_iteration_s + computed_s + pauses_s


def survival(children_s: float) -> Callable[[float], float]:
    """Return the function P(the last child takes t seconds longer) of t, given the seconds that are expected.

    With an exponential distribution a hold pays if and only if the children are expected to end before its break-even
    time, whatever the times are at which it may end.
    """
    return lambda more_s: exp(-more_s / children_s)
