"""Fairness between programs: how much longer each takes than it would take alone, and how evenly."""

from collections.abc import Sequence

from cluster.core.slo import ProgramRecord
from replicas.cost_model import CostModel


def alone_s(program: ProgramRecord, cost: CostModel, step_tokens: int) -> float:
    """Return the seconds without tools that a program's turns take on an idle replica that keeps all of its KV.

    Each turn computes the tokens that are new to the program, in steps of ``step_tokens`` at most, and then decodes one
    token a step. A turn that has not ended counts with the tokens that it has generated.
    """
    seconds = 0.0
    for turn in program.turns:
        known = min(turn.previous_context_tokens, max(0, turn.prompt_tokens - 1))
        seconds += cost.prefill_s(turn.prompt_tokens - known, known, step_tokens)
        decoded = max(0, turn.output_tokens - 1)
        # A decode's seconds are linear in its context, so that the mean context gives the sum.
        seconds += decoded * cost.decode_step_s(1, turn.prompt_tokens + (1 + turn.output_tokens) // 2)
    return seconds


def slowdown(program: ProgramRecord, cost: CostModel, step_tokens: int) -> float | None:
    """Return the program's seconds without tools divided by those it would take alone; None: no turn became due.

    What has not ended counts with its time so far.
    """
    alone = alone_s(program, cost, step_tokens)
    return None if program.spent_s is None or alone <= 0 else program.spent_s / alone


def jain(values: Sequence[float | None]) -> float | None:
    """Return Jain's index of fairness of the known values: (sum x)^2 / (n sum x^2); None if there are none.

    It is 1 if all values are equal, and 1/n if one has everything.
    """
    known = [value for value in values if value is not None]
    squares = sum(value * value for value in known)
    return sum(known) ** 2 / (len(known) * squares) if squares else None
