"""LAMPS, written a second time from the paper (sections 4.2 to 4.4), with nothing of `replicas.policies`.

Taken from docs/papers/lamps.md, because the paper is silent or the engine differs: C_batch is C and the running tokens;
the way is chosen again at the pause.
"""

from math import inf

from replicas.policy import HoldView, LoadView, PauseView, TurnView

THRESHOLD = 100


def forward_s(load: LoadView, tokens: int) -> float:
    """T_fwd(C): one iteration that computes a whole context."""
    return load.facts.cost.step_s(tokens, tokens, 1) if tokens else 0.0


def decode_s(load: LoadView) -> float:
    """Seconds of an iteration of the running requests, or of one if none runs."""
    count = max(1, load.running)
    return load.facts.cost.step_s(count, load.running_tokens, count)


def transfer_s(load: LoadView, tokens: int) -> float:
    cost = load.facts.cost
    return cost.swap_overhead_s + tokens * cost.swap_token_s


def wastes(load: LoadView, context: int, others: float, call_s: float) -> dict[str, float]:
    """Equations 1 to 3, without M."""
    return {
        "preserve": call_s * context,
        "discard": forward_s(load, context) * (context + others),
        "swap": 2 * transfer_s(load, context) * (context + others) if 0 < context <= load.facts.host_tokens else inf,
    }


def way(waste: dict[str, float]) -> str:
    """The least waste; of equals preserve, then discard."""
    return min(("preserve", "discard", "swap"), key=lambda name: waste[name])


def area(turn: TurnView) -> float:
    """Figure 4: the integral of memory over time of a segment, up to the end of its call's handling."""
    load, prompt = turn.load, turn.tokens
    output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)  # its prompt has the others
    prefill = forward_s(load, prompt) * prompt / 2
    decode = decode_s(load) * sum_of_growth(prompt, output)
    call_s = turn.forecast.pause_s
    if call_s <= 0:
        return prefill + decode
    context = prompt + round(output)
    waste = wastes(load, context, load.running_tokens, call_s)
    match way(waste):
        case "preserve":
            handled = call_s * context
        case "discard":
            handled = forward_s(load, context) * context / 2
        case _:
            handled = 2 * (transfer_s(load, context) * context / 2)
    return prefill + decode + handled


def sum_of_growth(prompt: int, output: float) -> float:
    """Token iterations of a context that grows from ``prompt`` by a token in each of ``output`` iterations."""
    return ((prompt + output) ** 2 - prompt**2) / 2


def starving(turn: TurnView) -> bool:
    """Section 4.4: waiting for the threshold, now or before, and only once the request was scheduled."""
    scheduled = turn.preempted or turn.program.last_served_s is not None
    waited = turn.load.step - turn.queued_step
    return scheduled and (waited >= THRESHOLD or turn.longest_wait_steps >= THRESHOLD)


def before(first: TurnView, second: TurnView) -> bool:
    """Whether ``first`` is scheduled before ``second``, if they are not equal."""
    if starving(first) != starving(second):
        return starving(first)
    return area(first) < area(second)


def at_pause(pause: PauseView) -> str:
    """The way for a request whose call begins now. Its own tokens still count as running."""
    load, context = pause.load, pause.context_tokens
    others = max(0, load.running_tokens - context)
    return way(wastes(load, context, others, max(0.0, pause.forecast.pause_s)))


def while_held(hold: HoldView) -> str:
    """The way for a request whose call lasts: at least the time so far."""
    elapsed_s = max(0.0, hold.load.now_s - hold.since_s)
    call_s = max(hold.forecast.pause_s, elapsed_s)
    return way(wastes(hold.load, hold.context_tokens, hold.load.running_tokens, call_s))
