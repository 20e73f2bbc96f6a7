"""What a planned program asks of a server that keeps everything: the tokens that have to be computed at least once."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.bench.workload import PlannedProgram


@dataclass(frozen=True, slots=True)
class TurnWork:
    """One turn. Lengths in tokens."""

    prompt_tokens: int
    """Of the whole prompt."""
    new_tokens: int
    """Of the prompt, those that no turn before has sent or generated at the same place."""
    output_tokens: int
    returned_tokens: int
    """What the next turn's prompt has beyond this turn's prompt and output; 0 for a last turn."""


def turns_of(program: PlannedProgram) -> list[TurnWork]:
    """The program's turns. The shared prefix counts as new in the first turn only: it survives a ``reset``.

    Where a turn's output is not sent again as a whole (hidden reasoning), what is kept of it moves to another place in
    the context, and is new in the turn after it.
    """
    contexts = program.contexts()
    works: list[TurnWork] = []
    for index, turn in enumerate(program.turns):
        new = turn.fresh_tokens
        if index and turn.reset:
            new -= min(program.prefix_tokens, new)
        elif index and (before := program.turns[index - 1]).kept_tokens < before.output_tokens:
            new += before.kept_tokens
        following = contexts[index + 1] if index + 1 < len(contexts) else 0
        works.append(
            TurnWork(
                prompt_tokens=contexts[index],
                new_tokens=new,
                output_tokens=turn.output_tokens,
                returned_tokens=max(0, following - contexts[index] - turn.output_tokens),
            )
        )
    return works


def tokens_of(works: Sequence[TurnWork]) -> int:
    """Tokens to compute: new prompt tokens and outputs."""
    return sum(work.new_tokens + work.output_tokens for work in works)
