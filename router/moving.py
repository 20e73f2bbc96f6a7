"""Is a program that resumes better off on another replica than at home? Pure."""

from router.candidate import Arrival
from router.placement import Choice
from router.settings import FrontSettings


def gains(turn: Arrival, here: Choice, there: Choice, settings: FrontSettings, ttft_s: float | None) -> bool:
    """Would it lose less, by more than what moving costs and the margins of the settings?

    Args:
        turn: the program's next.
        here: at home.
        there: at the best of the others.
        settings: with hysteresis, gain and margin.
        ttft_s: the bound on the time to the first token, if there is one: what is in time at home does not go to
            where it would be late.
    """
    if ttft_s is not None and here.first_token_s <= ttft_s < there.first_token_s:
        return False
    cost_s = max(0.0, there.gap.compute_tokens - here.gap.compute_tokens) * there.candidate.facts.token_s
    # Who finds nothing at home any more is as free to go as a new program.
    missing = here.gap.compute_tokens / max(1, turn.expected.prompt_tokens)
    margin_s = settings.move_gain_s + settings.move_margin * (1 - min(1.0, missing)) * here.seconds
    return here.seconds - there.seconds > settings.hysteresis * cost_s + margin_s
